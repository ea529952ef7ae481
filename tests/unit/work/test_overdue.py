"""Limits of how long events are waited for, with and without the task that looks at them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from ovmstrio.work.overdue import wait_within, watch_overdue


async def test_an_event_ends_its_wait_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """No time passes, and a second wait is like the first."""
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_overdue)
        for _ in range(2):
            event, begin = trio.Event(), trio.current_time()
            nursery.start_soon(wait_within, event, 5)
            await trio.testing.wait_all_tasks_blocked()
            event.set()
            await trio.testing.wait_all_tasks_blocked()
            assert trio.current_time() == begin
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_watched", [True, False])
async def test_a_wait_ends_with_its_limit(autojump_clock: trio.testing.MockClock, is_watched: bool) -> None:
    """Each with its own, whichever was begun first, and hardly later."""
    ends: dict[float, float] = {}

    async def wait(seconds: float) -> None:
        await wait_within(trio.Event(), seconds)
        ends[seconds] = trio.current_time() - begin

    async with trio.open_nursery() as nursery:
        if is_watched:
            await nursery.start(watch_overdue)
        begin = trio.current_time()
        async with trio.open_nursery() as waits:
            for seconds in (3.0, 1.0, 0.001):
                waits.start_soon(wait, seconds)
        nursery.cancel_scope.cancel()
    assert list(ends) == [0.001, 1.0, 3.0]
    assert all(seconds <= taken <= seconds + 0.05 for seconds, taken in ends.items())


async def test_nothing_is_looked_at_while_nothing_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    """The task sleeps without a deadline, so that an idle server stays idle."""
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_overdue)
        with trio.move_on_after(1):
            await wait_within(trio.Event(), 10)
        await trio.sleep(1)
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_task_is_the_end_of_what_it_watched(autojump_clock: trio.testing.MockClock) -> None:
    """What is waited for afterwards has its limit all the same, also behind an older task that ended first."""
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as older:
            await older.start(watch_overdue)
            async with trio.open_nursery() as newer:
                await newer.start(watch_overdue)
                nursery.start_soon(wait_within, event := trio.Event(), 1000)
                await trio.testing.wait_all_tasks_blocked()
                older.cancel_scope.cancel()
        assert event.is_set()
        begin = trio.current_time()
        await wait_within(trio.Event(), 1)
        assert trio.current_time() - begin == pytest.approx(1, abs=0.05)
