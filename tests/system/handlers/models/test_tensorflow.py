"""Trials of TensorFlow models of handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ovmstrio.runtimes.handlers.config.project_spec import (
    DEFAULT_MODEL,
    ModelEntry,
    ModelsSpec,
    ProjectSpec,
)
from ovmstrio.runtimes.handlers.models.library import LibraryOptions
from ovmstrio.runtimes.handlers.models.opening import ProjectModels, open_models
from tests.support.saved_models import (
    CLASSIFY,
    DOUBLE,
    write_classifier,
)
from tests.support.servables import trying, verdicts


def _project(root: Path, models: ModelsSpec | None, **more: Any) -> ProjectSpec:
    file = root / "nucleus.yaml"
    handler = root / "handler.py"
    return ProjectSpec(
        name="p", directory=root, file=file, type="tensorflow", python_path=root, handler_path=handler, models=models
    ).model_copy(update=more)


def _single(path: Path, key: str | None = None) -> ModelsSpec:
    entry = ModelEntry(name=DEFAULT_MODEL, path=str(path), signature_key=key)
    return ModelsSpec(section="models", kind="path", entries=(entry,), signature_key=key)


@asynccontextmanager
async def _open(tmp_path: Path, models: ModelsSpec | None, **more: Any) -> AsyncIterator[ProjectModels]:
    options = LibraryOptions(root=tmp_path / "down")
    async with open_models(_project(tmp_path, models, **more), options=options) as opened:
        yield opened


async def _predict(opened: ProjectModels, *args: Any) -> dict[str, Any]:
    client: Any = opened.clients["tensorflow_client"]
    return await trio.to_thread.run_sync(client.predict, *args)


async def test_models_of_handlers_are_tried_first(tmp_path: Path) -> None:
    """With one signature of several, too, which is read from a folder that is gone after the load."""
    write_classifier(tmp_path / "up", a=CLASSIFY, b=DOUBLE)
    async with trying(tmp_path / "trials"), _open(tmp_path, _single(tmp_path / "up", "b")) as opened:
        assert await _predict(opened, {"features": [[1, 0, 0]]}) == {"doubled": [0.0, 2.0]}
        (verdict,) = verdicts(tmp_path / "trials")
        assert verdict["crash"] == ""
