"""One loop for everything that is looked at from time to time, under a clock that stands still between looks."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.repository.watcher import FileWatcher
from ovmstrio.work.backoff import Backoff


class _Looks:
    """Looks that take a second each, and see everything or not as a test says."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.is_complete = True

    async def __call__(self) -> bool:
        self.begun.append(trio.current_time())
        await trio.sleep(1)
        return self.is_complete


async def test_pauses_grow_while_looks_fail(autojump_clock: MockClock) -> None:
    looks = _Looks()
    begin = trio.current_time()
    watcher = FileWatcher(looks, 10, Backoff(1, 3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        await watcher.wait_look()
        looks.is_complete = False
        while watcher.looks < 5:
            await watcher.wait_look()
        looks.is_complete = True
        await watcher.wait_look()
        looks.is_complete = False
        await watcher.wait_look()
        await watcher.wait_look()
        nursery.cancel_scope.cancel()
    assert [time - begin for time in looks.begun] == [0, 11, 13, 16, 20, 24, 35, 37]


async def test_pauses_are_constant_without_a_backoff(autojump_clock: MockClock) -> None:
    looks = _Looks()
    looks.is_complete = False
    begin = trio.current_time()
    with trio.move_on_after(11):
        await FileWatcher(looks, 2).run(pauses_first=True)
    assert [time - begin for time in looks.begun] == [2, 5, 8]


async def test_a_requested_look_begins_at_once_and_is_shared(autojump_clock: MockClock) -> None:
    looks = _Looks()
    begin = trio.current_time()
    watcher = FileWatcher(looks, 100)
    ended: list[float] = []

    async def request(seconds: float) -> None:
        await trio.sleep(seconds)
        await watcher.look_now()
        ended.append(trio.current_time() - begin)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        async with trio.open_nursery() as callers:
            for seconds in (5, 5, 5.5):
                callers.start_soon(request, seconds)
        nursery.cancel_scope.cancel()
    assert [time - begin for time in looks.begun] == [0, 5, 6]
    assert ended == [6, 6, 7]


async def test_an_error_of_a_look_ends_the_watcher(mock_clock: MockClock) -> None:
    async def look() -> bool:
        await wait_all_tasks_blocked()
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="on fire"):
        await FileWatcher(look, 1).run()
