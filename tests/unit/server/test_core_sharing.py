"""Who has threads bound to cores, as models come and go."""

from __future__ import annotations

from functools import partial

import trio
import trio.testing

from ovmstrio.server.core_sharing import Sharing, share_cores
from ovmstrio.work.cores import CoreShare


class _User:
    def __init__(self, cores: CoreShare, *, is_pinned: bool | None, obeys: bool = True, weight_bytes: int = 0) -> None:
        self.is_pinned = is_pinned
        self.weight_bytes = weight_bytes
        self.asked_at: list[float] = []
        self.wants = False
        self._cores = cores
        self._obeys = obeys
        self._begin = trio.current_time()
        cores.users.add(self)

    def wants_others(self) -> bool:
        return self.wants

    async def choose_cores(self) -> None:
        self.wants = False
        self.asked_at.append(trio.current_time() - self._begin)
        await trio.sleep(1)
        if self._obeys:
            self.is_pinned = not self._cores.is_shared


async def _share(nursery: trio.Nursery, cores: CoreShare, sharing: Sharing = "auto") -> None:
    await nursery.start(share_cores, sharing, cores)


async def test_a_model_leaves_its_cores_once_another_has_come_to_stay(autojump_clock: trio.testing.MockClock) -> None:
    """The one that was alone is compiled again some ten seconds after the second came, and the second is not."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        first = _User(cores, is_pinned=True)
        await trio.sleep(60)
        assert first.asked_at == []

        second = _User(cores, is_pinned=False)
        await trio.sleep(600)
        nursery.cancel_scope.cancel()

    (asked,) = first.asked_at
    assert 70 <= asked <= 80
    assert (first.is_pinned, second.asked_at) == (False, [])


async def test_a_model_that_is_retired_after_its_choice_is_let_go(autojump_clock: trio.testing.MockClock) -> None:
    """It would stay in memory, and the one that is left would never have its cores for itself."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        first, second = _User(cores, is_pinned=True), _User(cores, is_pinned=False)
        await trio.sleep(60)
        assert len(first.asked_at) == 1

        del first
        assert list(cores.users) == [second]
        await trio.sleep(200)
        nursery.cancel_scope.cancel()

    assert second.is_pinned


async def test_a_model_that_comes_and_goes_costs_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """As while a version is replaced: the new one is loaded beside the old one, which then goes."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        first = _User(cores, is_pinned=True)
        for _ in range(10):
            second = _User(cores, is_pinned=True)
            await trio.sleep(4)
            cores.users.discard(second)
            await trio.sleep(16)
        nursery.cancel_scope.cancel()

    assert first.asked_at == second.asked_at == []


async def test_the_last_one_has_the_cores_for_itself_again_after_minutes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Others may come back, so that it is left as it is for two minutes."""
    cores = CoreShare()
    cores.services = 2
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        last = _User(cores, is_pinned=False)
        await trio.sleep(50)
        cores.services = 1
        await trio.sleep(100)
        assert last.asked_at == []

        await trio.sleep(60)
        nursery.cancel_scope.cancel()

    assert len(last.asked_at) == 1
    assert last.is_pinned


async def test_one_is_compiled_at_a_time_and_once_even_if_that_changes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What OpenVINO binds all the same is not compiled for ever; whose user has decided, never."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        stubborn = [_User(cores, is_pinned=True, obeys=False) for _ in range(2)]
        decided = _User(cores, is_pinned=None)
        await trio.sleep(600)
        nursery.cancel_scope.cancel()

    (first,), (second,) = (each.asked_at for each in stubborn)
    assert abs(first - second) >= 1
    assert decided.asked_at == []


async def test_a_model_that_memory_has_no_room_for_twice_keeps_its_cores(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The system would end the server for what is to make it a little faster."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(share_cores, "auto", cores, room=lambda: 10.0))
        large, small = (_User(cores, is_pinned=True, weight_bytes=size) for size in (6, 5))
        await trio.sleep(60)
        nursery.cancel_scope.cancel()

    assert (large.asked_at, len(small.asked_at)) == ([], 1)


async def test_nothing_is_chosen_where_that_is_turned_off(autojump_clock: trio.testing.MockClock) -> None:
    """``off`` leaves all to OpenVINO, as long as there is one process."""
    cores = CoreShare()
    cores.services = 3
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores, "off")
        users = [_User(cores, is_pinned=True) for _ in range(2)]
        await trio.sleep(600)

    assert [each.asked_at for each in users] == [[], []]
    assert not cores.is_shared
    cores.processes = 2
    assert cores.is_shared


async def test_a_model_whose_calls_want_it_is_compiled_again_at_the_next_look(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whether its threads are bound or not, and once for each time that they want it."""
    cores = CoreShare()
    async with trio.open_nursery() as nursery:
        await _share(nursery, cores)
        busy, other = _User(cores, is_pinned=None), _User(cores, is_pinned=None)
        await trio.sleep(21)
        busy.wants = True
        await trio.sleep(60)
        nursery.cancel_scope.cancel()

    (asked,) = busy.asked_at
    assert 21 <= asked <= 26
    assert other.asked_at == []


async def test_calls_change_nothing_where_memory_has_no_room_for_the_model_twice(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nor is that looked at again and again, or told."""
    cores = CoreShare()
    asked = 0

    def room() -> float:
        nonlocal asked
        asked += 1
        return 10.0

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(share_cores, "auto", cores, room=room))
        large = _User(cores, is_pinned=None, weight_bytes=6)
        large.wants = True
        await trio.sleep(60)
        nursery.cancel_scope.cancel()

    assert (large.asked_at, asked) == ([], 1)
