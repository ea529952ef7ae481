"""A language model on disk, written once, and services of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.generation.load_text_model import load_text_model
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.support.tiny_llm import write_tiny_folder

ServeTiny = Callable[..., AbstractAsyncContextManager[TextModel]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve_tiny(tiny_folder: Path) -> ServeTiny:
    """Load the model while a block lasts, with settings."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[TextModel]:
        spec = TextModelSpec(
            **{"name": "tiny", "base_path": tiny_folder, "path": tiny_folder, "cache_size": 0.002, **settings}
        )
        failure = None
        with trio.fail_after(120):
            async with trio.open_nursery() as tasks:
                try:
                    model = await load_text_model(spec, LoadContext(lease_nothing, tasks))
                except ServerError as error:
                    failure = error
                else:
                    try:
                        yield model
                    finally:
                        await model.aclose()
        if failure is not None:
            raise failure

    return serve
