from __future__ import annotations

import pytest
import trio
import trio.testing

from ovmstrio.util.backoff import Backoff
from ovmstrio.util.deadline_sweeper import wait_within, watch_overdue


def test_pauses_double_up_to_the_maximum_and_restart_after_a_success() -> None:
    backoff = Backoff(0.25, 3.0)
    assert [backoff.seconds_after() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.seconds_after() for _ in range(2)] == [0.25, 0.5]
    assert {backoff.seconds_after() for _ in range(5000)} == {1.0, 2.0, 3.0}


def test_factor_one_keeps_the_pause() -> None:
    backoff = Backoff(10.0, 10.0, factor=1.0)
    assert [backoff.seconds_after() for _ in range(3)] == [10.0] * 3


def test_pause_is_the_first_after_a_long_life() -> None:
    backoff = Backoff(1.0, 60.0, 5.0)
    assert [backoff.seconds_after(lived) for lived in (0, 5, 5.1, 0, 3600, 0)] == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]


async def test_event_ends_its_wait_at_once(autojump_clock: trio.testing.MockClock) -> None:
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
async def test_wait_ends_at_its_limit(autojump_clock: trio.testing.MockClock, is_watched: bool) -> None:
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


async def test_watcher_sleeps_without_deadline_while_nothing_waits(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_overdue)
        with trio.move_on_after(1):
            await wait_within(trio.Event(), 10)
        await trio.sleep(1)
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        nursery.cancel_scope.cancel()


async def test_end_of_the_watcher_ends_its_waits(autojump_clock: trio.testing.MockClock) -> None:
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
