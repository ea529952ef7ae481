"""A loader of stubs and a registry that loads with it and does not poll."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ovmstrio.registry import Registry
from tests.support.stub_registry import StubLoader, registry_of, running


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
