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


async def test_looks_come_after_pauses_that_grow_while_they_fail(autojump_clock: MockClock) -> None:
    """A pause begins when a look has ended; what was seen at last sets the pauses back."""
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


async def test_without_a_backoff_every_pause_is_the_same(autojump_clock: MockClock) -> None:
    """Whoever has seen to it elsewhere that failures are not tried too often looks on in one rhythm."""
    looks = _Looks()
    looks.is_complete = False
    begin = trio.current_time()
    with trio.move_on_after(11):
        await FileWatcher(looks, 2).run(pauses_first=True)
    assert [time - begin for time in looks.begun] == [2, 5, 8]


async def test_a_look_that_is_asked_for_begins_at_once_and_is_waited_for(autojump_clock: MockClock) -> None:
    """Two who ask while it pauses share a look; one who asks during a look gets the next, without a pause before it."""
    looks = _Looks()
    begin = trio.current_time()
    watcher = FileWatcher(looks, 100)
    ended: list[float] = []

    async def ask(seconds: float) -> None:
        await trio.sleep(seconds)
        await watcher.look_now()
        ended.append(trio.current_time() - begin)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        async with trio.open_nursery() as askers:
            for seconds in (5, 5, 5.5):
                askers.start_soon(ask, seconds)
        nursery.cancel_scope.cancel()
    assert [time - begin for time in looks.begun] == [0, 5, 6]
    assert ended == [6, 6, 7]


async def test_an_error_of_a_look_ends_the_watcher(mock_clock: MockClock) -> None:
    """What a look does not handle itself goes to whoever runs the watcher."""

    async def look() -> bool:
        await wait_all_tasks_blocked()
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="on fire"):
        await FileWatcher(look, 1).run()
