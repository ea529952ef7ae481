"""A loader of stubs and a registry that loads with it and does not poll."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio

from ovmstrio.serving.registry import Registry
from tests.support.stub_registry import StubLoader, registry_of, running

Loading = Callable[..., AbstractAsyncContextManager[trio.Nursery]]


@pytest.fixture
def loader() -> StubLoader:
    return StubLoader()


@pytest.fixture
async def registry(loader: StubLoader) -> AsyncIterator[Registry]:
    """Run a registry; afterwards every servable has been closed exactly once and never misused."""
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        yield registry
    assert loader.misuse == []
    assert [servable.closed for servable in loader.opened] == [1] * len(loader.opened)


@pytest.fixture
def loading(loader: StubLoader, registry: Registry) -> Loading:
    """Apply services and hold the load of version 1 of one of them until the end of a block."""

    @asynccontextmanager
    async def hold(*specs: Any, name: str = "m") -> AsyncIterator[trio.Nursery]:
        gate = loader.hold(name, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registry.apply, specs)
            await loader.begun[name, 1].wait()
            yield nursery
            gate.set()

    return hold
