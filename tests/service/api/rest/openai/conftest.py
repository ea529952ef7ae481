"""A REST front end with a text generator behind it, which does what tests have written down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ovmstrio.observability.metrics import Metrics
from tests.support.text_generators import load_generator, text_spec
from tests.unit.api.rest.servers import Serving, serving_rest


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve ``chat``, which makes text, and ``echo``, which takes tensors."""
    spec = text_spec(tmp_path / "text")
    async with serving_rest(tmp_path, models=(spec,), loader=load_generator, metrics=Metrics()) as server:
        yield server


@pytest.fixture
async def ovms_serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve the same with errors as OVMS has them."""
    spec = text_spec(tmp_path / "text")
    options = {"openai_errors": "ovms"}
    async with serving_rest(tmp_path, models=(spec,), loader=load_generator, front_end=options) as server:
        yield server
