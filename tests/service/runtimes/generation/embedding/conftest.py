"""Tiny models of embeddings and ranks, loaded as a server does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.hooks import NULL_METERS, Meters
from ovmstrio.runtimes.generation.loading import load_task
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.support.model_hosts import HostOf, ModelHost, hosts_of
from tests.support.tiny_encoders import write_embedder, write_reranker

Load = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of embeddings."""
    return write_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="session")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory, embedder_folder: Path) -> Path:
    """Write the model of ranks."""
    return write_reranker(tmp_path_factory.mktemp("reranker"), embedder_folder)


@asynccontextmanager
async def _load(
    folder: Path, task: Task = Task.EMBEDDINGS, meters: Meters = NULL_METERS, **settings: Any
) -> AsyncIterator[Any]:
    spec = TextModelSpec(name="tiny", base_path=folder, path=folder, task=task, **settings)
    async with trio.open_nursery() as tasks:
        service = await load_task(spec, LoadContext(lease_nothing, tasks, meters))
        try:
            yield service
        finally:
            with trio.CancelScope(shield=True):
                await service.aclose()


@pytest.fixture(scope="module")
def host_of() -> Iterator[HostOf]:
    """Return what serves a folder with settings for all tests of a module."""
    with hosts_of(_load) as host:
        yield host


@pytest.fixture(scope="module")
def embedder(host_of: HostOf, embedder_folder: Path) -> ModelHost:
    """Serve the model of embeddings for all tests of a module."""
    return host_of(folder=embedder_folder)


@pytest.fixture(scope="module")
def cutting_embedder(host_of: HostOf, embedder_folder: Path) -> ModelHost:
    """Serve the model of embeddings, which cuts texts off, for all tests of a module."""
    return host_of(folder=embedder_folder, truncate=True)


@pytest.fixture(scope="module")
def reranker(host_of: HostOf, reranker_folder: Path) -> ModelHost:
    """Serve the model of ranks for all tests of a module."""
    return host_of(folder=reranker_folder, task=Task.RERANK)


@pytest.fixture
def load() -> Load:
    """Give what loads a folder for the length of a block."""
    return _load


async def problems_of(loading: AbstractAsyncContextManager[Any]) -> list[Problem]:
    """Tell why a folder cannot be loaded."""
    problems: list[Problem] = []
    try:
        async with loading:
            pass
    except* ConfigError as group:
        problems += (
            problem for error in group.exceptions if isinstance(error, ConfigError) for problem in error.problems
        )
    return problems
