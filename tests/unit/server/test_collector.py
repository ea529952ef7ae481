"""What the collector is spared while a server starts, and that it goes on afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ovmstrio.registry import Registry
from ovmstrio.server.collector import spare_the_collector


class _Loading:
    def __init__(self) -> None:
        self.loaded = trio.Event()

    @property
    def has_loaded(self) -> bool:
        return self.loaded.is_set()

    async def wait_loaded(self) -> None:
        await self.loaded.wait()


class _Circle:
    def __init__(self) -> None:
        self.itself = self


def _circles() -> int:
    return sum(isinstance(each, _Circle) for each in gc.get_objects())


@pytest.fixture(autouse=True)
def _collects_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def test_it_looks_while_models_load_and_once_more_when_they_have() -> None:
    """What came before is found while nobody waits, and what loads left behind is not kept for ever."""
    registry = _Loading()
    async with trio.open_nursery() as nursery:
        _Circle()
        nursery.start_soon(spare_the_collector, cast("Registry", registry))
        await wait_all_tasks_blocked()
        assert _circles() == 0
        frozen = gc.get_freeze_count()
        assert frozen > 0
        _Circle()
        kept: list[list[int]] = [[] for _ in range(1000)]
        registry.loaded.set()
    assert _circles() == 0
    assert gc.get_freeze_count() > frozen + len(kept) / 2
    assert gc.isenabled()
    assert 1000 < gc.get_threshold()[0] <= 20_000


async def test_it_looks_once_where_everything_is_loaded() -> None:
    """A server that has its paths at the root is."""
    registry = _Loading()
    registry.loaded.set()
    looks: list[str] = []
    gc.callbacks.append(lambda phase, _: looks.append(phase))
    try:
        await spare_the_collector(cast("Registry", registry))
    finally:
        gc.callbacks.pop()
    assert looks == ["start", "stop"]
