from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.server import server as module
from ovmstrio.server.gc_tuning import freeze_gc
from ovmstrio.server.malloc_trim import TrimPolicy, trim_freed_memory
from ovmstrio.server.server import make_send_budgets
from ovmstrio.server.settings import ServerSettings
from ovmstrio.serving.registry import Registry
from tests.support.waits import WAIT_SECONDS

MIB = 2**20


def test_memory_is_trimmed_once_after_growth_has_ended() -> None:
    growth = TrimPolicy(100 * MIB, 0)
    sizes = ((104, 2), (200, 4), (300, 6), (290, 8))
    assert [growth.is_over(size * MIB, now, is_busy=False) for size, now in sizes] == [False, False, False, True]
    growth.record_trim(105 * MIB, 8, is_busy=False)
    assert not growth.is_over(106 * MIB, 20, is_busy=False)


def test_memory_freed_after_a_trim_is_trimmed() -> None:
    growth = TrimPolicy(100 * MIB, 0, 40 * MIB)
    growth.is_over(3_000 * MIB, 2, 50 * MIB, is_busy=True)
    assert growth.is_over(3_000 * MIB, 4, 50 * MIB, is_busy=True)
    growth.record_trim(2_990 * MIB, 4, 41 * MIB, is_busy=True)
    assert not growth.is_over(2_990 * MIB, 6, 41 * MIB, is_busy=False)
    assert growth.is_over(1_800 * MIB, 8, 1_700 * MIB, is_busy=False)
    growth.record_trim(110 * MIB, 8, 42 * MIB, is_busy=False)
    assert not growth.is_over(110 * MIB, 10, 42 * MIB, is_busy=False)


def test_memory_that_grows_again_at_once_is_trimmed_at_growing_intervals() -> None:
    growth = TrimPolicy(100 * MIB, 0)
    times: list[int] = []
    for now in range(2, 2_000, 2):
        if growth.is_over(300 * MIB, now, is_busy=True):
            growth.record_trim(100 * MIB, now, is_busy=True)
            times.append(now)
    assert times[:5] == [4, 8, 12, 20, 36]
    assert times[-1] - times[-2] >= 500
    assert growth.is_over(300 * MIB, 9_000, is_busy=True)
    growth.record_trim(100 * MIB, 9_000, is_busy=True)
    growth.is_over(300 * MIB, 9_004, is_busy=True)
    assert growth.is_over(300 * MIB, 9_006, is_busy=True)
    growth.is_over(300 * MIB, 9_008, is_busy=False)
    assert growth.is_over(300 * MIB, 9_010, is_busy=False)


@dataclass
class _Process:
    size: int
    trims: int = 0
    trimmed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.change, self.changes = trio.open_memory_channel[None](1)

    def resident(self) -> int:
        return self.size

    def parts(self) -> tuple[Any, ...]:
        return self.changes.receive, self.resident, self.trim, lambda: 0.0

    def trim(self) -> None:
        self.size = 100 * MIB
        self.trims += 1
        self.trimmed.set()


async def test_idle_server_trims_memory_of_requests_once(mock_clock: MockClock) -> None:
    process = _Process(100 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trim_freed_memory, *process.parts())
        await wait_all_tasks_blocked()
        process.size = 500 * MIB
        for _ in range(2):
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
        assert await trio.to_thread.run_sync(process.trimmed.wait, WAIT_SECONDS)
        for _ in range(100):
            await wait_all_tasks_blocked()
            mock_clock.jump(2)
        assert process.trims == 1
        nursery.cancel_scope.cancel()


async def test_memory_of_an_unloaded_model_is_trimmed(mock_clock: MockClock) -> None:
    process = _Process(500 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trim_freed_memory, *process.parts())
        await wait_all_tasks_blocked()
        for change in (False, True):
            if change:
                process.change.send_nowait(None)
            await wait_all_tasks_blocked()
            assert not process.trims
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
        assert await trio.to_thread.run_sync(process.trimmed.wait, WAIT_SECONDS)
        assert process.size == 100 * MIB
        nursery.cancel_scope.cancel()


# Memory limits


def test_pending_answers_share_a_quarter_of_the_memory_or_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda: 800 * MIB)
    assert make_send_budgets(ServerSettings()).budget.limit == 200 * MIB
    assert make_send_budgets(ServerSettings(), processes=2).budget.limit == 100 * MIB
    assert make_send_budgets(ServerSettings(grpc_memory_quota=900 * MIB)).budget.limit == 900 * MIB
    pending = make_send_budgets(ServerSettings(max_pending_response_bytes=MIB, client_stall_timeout=7))
    share = pending.share()
    share.add(MIB + 1)
    assert share.is_full
    assert pending.stall_timeout_seconds == 7


# Garbage collection


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
    # What pytest froze after the collection stays frozen, because later collections would take half a second each.
    gc.set_threshold(*before)


_OLDEST = 2


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Return the begins and ends of full collections."""
    looks: list[str] = []

    def look(phase: str, about: Mapping[str, int]) -> None:
        if about["generation"] == _OLDEST:
            looks.append(phase)

    gc.callbacks.append(look)
    yield looks
    gc.callbacks.remove(look)


async def test_objects_are_frozen_before_models_load_and_collected_once_they_have(collections: list[str]) -> None:
    registry = _Loading()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(freeze_gc, cast("Registry", registry))
        await wait_all_tasks_blocked()
        assert collections == []
        frozen = gc.get_freeze_count()
        assert frozen > 0
        _Circle()
        kept: list[list[int]] = [[] for _ in range(1000)]
        registry.loaded.set()
    assert collections == ["start", "stop"]
    assert _circles() == 0
    assert gc.get_freeze_count() > frozen + len(kept) / 2
    assert gc.isenabled()
    assert 1000 < gc.get_threshold()[0] <= 20_000


async def test_garbage_is_collected_once_if_everything_is_loaded(collections: list[str]) -> None:
    registry = _Loading()
    registry.loaded.set()
    await freeze_gc(cast("Registry", registry))
    assert collections == ["start", "stop"]
