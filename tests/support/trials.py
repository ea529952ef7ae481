"""Models that are tried, and what a folder remembers of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.trials import trying_models
from ovmstrio.openvino.trials.trying import TrialMode
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.servables import EXACT


def saved(model: ov.Model, repository: Path, name: str = "model", **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, base_path=ir.save(model, repository, name), plugin_config=EXACT, **settings)


async def load_saved(spec: ModelSpec) -> list[Problem]:
    """Load version 1 of a model and let it go; gives what was remarked."""
    remarks: list[Problem] = []
    servable = await load_model(spec, 1, spec.base_path / "1", remark=remarks.append)
    await servable.aclose()
    return remarks


async def refusal_of(spec: ModelSpec) -> Problem:
    with pytest.raises(ConfigError) as caught:
        await load_saved(spec)
    (problem,) = caught.value.problems
    return problem


@asynccontextmanager
async def trying(folder: Path, mode: TrialMode = "auto", **options: float) -> AsyncIterator[None]:
    """Have models tried that are loaded in the block, and remembered in a folder."""
    async with trio.open_nursery() as nursery:
        with trying_models(nursery, mode, folder, **options):
            yield
        nursery.cancel_scope.cancel()


def verdicts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in sorted((folder / "verdicts").glob("*"))]
