from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from trio.testing import MockClock

from ovmstrio.server.server import CpuPinning, manage_cpu_pinning
from ovmstrio.util.cores import CoreShare


class _User:
    """A model that takes a second to compile again, and keeps the times of its compilations."""

    def __init__(self, cores: CoreShare, *, is_pinned: bool | None, obeys: bool = True, weight_bytes: int = 0) -> None:
        self.is_pinned = is_pinned
        self.weight_bytes = weight_bytes
        self.compiled_at: list[float] = []
        self.wants = False
        self._cores = cores
        self._obeys = obeys
        self._begin = trio.current_time()
        cores.users.add(self)

    def wants_others(self) -> bool:
        return self.wants

    async def choose_cores(self) -> None:
        self.wants = False
        self.compiled_at.append(trio.current_time() - self._begin)
        await trio.sleep(1)
        if self._obeys:
            self.is_pinned = not self._cores.is_shared


@asynccontextmanager
async def _sharing(sharing: CpuPinning = "auto", **options: Any) -> AsyncIterator[CoreShare]:
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(manage_cpu_pinning, sharing, cores, **options))
        yield cores
        nursery.cancel_scope.cancel()


async def test_pinned_model_is_unpinned_some_seconds_after_another_is_loaded(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        first = _User(cores, is_pinned=True)
        await trio.sleep(60)
        assert first.compiled_at == []
        second = _User(cores, is_pinned=False)
        await trio.sleep(600)
    (compiled,) = first.compiled_at
    assert 70 <= compiled <= 80
    assert (first.is_pinned, second.compiled_at) == (False, [])


async def test_unloaded_model_is_not_kept_in_memory(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        first, second = _User(cores, is_pinned=True), _User(cores, is_pinned=False)
        await trio.sleep(60)
        assert len(first.compiled_at) == 1
        del first
        assert list(cores.users) == [second]
        await trio.sleep(200)
    assert second.is_pinned


async def test_models_that_are_replaced_quickly_are_not_compiled_again(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        first = _User(cores, is_pinned=True)
        for _ in range(10):
            second = _User(cores, is_pinned=True)
            await trio.sleep(4)
            cores.users.discard(second)
            await trio.sleep(16)
    assert first.compiled_at == second.compiled_at == []


async def test_last_service_is_pinned_two_minutes_after_the_others_are_unloaded(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        cores.services = 2
        last = _User(cores, is_pinned=False)
        await trio.sleep(50)
        cores.services = 1
        await trio.sleep(100)
        assert last.compiled_at == []
        await trio.sleep(60)
    assert len(last.compiled_at) == 1
    assert last.is_pinned


async def test_models_are_compiled_one_at_a_time_and_once_even_if_they_stay_pinned(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        stubborn = [_User(cores, is_pinned=True, obeys=False) for _ in range(2)]
        configured_by_user = _User(cores, is_pinned=None)
        await trio.sleep(600)
    (first,), (second,) = (each.compiled_at for each in stubborn)
    assert abs(first - second) >= 1
    assert configured_by_user.compiled_at == []


async def test_model_that_does_not_fit_into_memory_twice_stays_pinned(autojump_clock: MockClock) -> None:
    async with _sharing(room=lambda: 10.0) as cores:
        large, small = (_User(cores, is_pinned=True, weight_bytes=size) for size in (6, 5))
        await trio.sleep(60)
    assert (large.compiled_at, len(small.compiled_at)) == ([], 1)


async def test_nothing_is_compiled_again_with_sharing_off(autojump_clock: MockClock) -> None:
    async with _sharing("off") as cores:
        cores.services = 3
        users = [_User(cores, is_pinned=True) for _ in range(2)]
        await trio.sleep(600)
    assert [each.compiled_at for each in users] == [[], []]
    assert not cores.is_shared
    cores.processes = 2
    assert cores.is_shared


async def test_model_whose_calls_want_other_cores_is_compiled_again_once(autojump_clock: MockClock) -> None:
    async with _sharing() as cores:
        busy, other = _User(cores, is_pinned=None), _User(cores, is_pinned=None)
        await trio.sleep(21)
        busy.wants = True
        await trio.sleep(60)
    (compiled,) = busy.compiled_at
    assert 21 <= compiled <= 26
    assert other.compiled_at == []


async def test_free_memory_is_read_once_for_calls_that_want_other_cores(autojump_clock: MockClock) -> None:
    rooms: list[float] = []

    def room() -> float:
        rooms.append(10.0)
        return 10.0

    async with _sharing(room=room) as cores:
        large = _User(cores, is_pinned=None, weight_bytes=6)
        large.wants = True
        await trio.sleep(60)
    assert (large.compiled_at, len(rooms)) == ([], 1)
