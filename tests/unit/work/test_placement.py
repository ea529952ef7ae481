from __future__ import annotations

import threading

import pytest
import trio

from ovmstrio.work.placement import (
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    LOADS_AT_ONCE,
    Placement,
    run_load,
)
from tests.support.waits import WAIT_SECONDS


def test_short_inferences_of_fixed_shape_run_inline() -> None:
    """A model of one shape is inline for good when it is fast enough."""
    assert Placement.measured(INLINE_THRESHOLD_SECONDS / 2, 40, fixed_shape=True).is_inline(40)


def test_long_inferences_run_elsewhere() -> None:
    """At the threshold nothing is inline, not even an empty request."""
    assert not Placement.measured(INLINE_THRESHOLD_SECONDS, 40, fixed_shape=True).is_inline(0)
    assert not Placement.away().is_inline(0)


def test_inferences_that_fill_the_cores_have_a_limit_of_their_own() -> None:
    """However busy the loop is: it is the same work there, and less beside it."""
    short, limit = 2 * INLINE_THRESHOLD_SECONDS, FILLING_THRESHOLD_SECONDS
    placement = Placement.measured(short, 40, fixed_shape=True, limit=limit)
    assert placement.is_inline(40)
    assert not any(placement.learn(40, short, INLINE_THRESHOLD_SECONDS / 2, on_loop=True) for _ in range(200))
    assert placement.is_inline(40)
    assert sum([placement.learn(40, 2 * limit, on_loop=True) for _ in range(200)]) == 1
    assert not placement.is_inline(40)
    assert not Placement.measured(limit, 40, fixed_shape=True, limit=limit).is_inline(40)


def test_growing_requests_leave_the_event_loop() -> None:
    """Where shapes may grow, the time is taken to grow with them."""
    placement = Placement.measured(INLINE_THRESHOLD_SECONDS / 10, 40, fixed_shape=False)
    assert placement.is_inline(399)
    assert not placement.is_inline(401)


def test_a_size_leaves_the_loop_when_its_times_stay_long_and_comes_back_when_they_stay_short() -> None:
    """Long runs now and then change nothing, and times near the threshold move nothing to and fro."""
    placement = Placement.measured(INLINE_THRESHOLD_SECONDS / 10, 40, fixed_shape=True)
    assert not any(placement.learn(40, 1.0 if number % 3 == 0 else 1e-6) for number in range(300))
    assert placement.is_inline(40)
    moves = [placement.learn(40, 2 * INLINE_THRESHOLD_SECONDS) for _ in range(100)]
    assert sum(moves) == 1
    assert not placement.is_inline(40)
    assert not any(placement.learn(40, INLINE_THRESHOLD_SECONDS) for _ in range(200))
    assert sum([placement.learn(40, INLINE_THRESHOLD_SECONDS / 2) for _ in range(100)]) == 1
    assert placement.is_inline(40)
    assert not any(placement.learn(40, INLINE_THRESHOLD_SECONDS * 1.1) for _ in range(200))


def test_loading_does_not_decide_for_life() -> None:
    """A model that was slow while others loaded comes to the loop once it is seen to be short."""
    placement = Placement.measured(50 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=False)
    assert not placement.is_inline(40)
    for _ in range(40):
        placement.learn(40, INLINE_THRESHOLD_SECONDS / 10)
    assert placement.is_inline(40)
    assert not placement.is_inline(4000)


def test_sizes_are_learnt_apart() -> None:
    """Large inputs of an open shape leave the loop, small ones stay."""
    placement = Placement.measured(INLINE_THRESHOLD_SECONDS / 1000, 40, fixed_shape=False)
    for _ in range(100):
        placement.learn(4000, 10 * INLINE_THRESHOLD_SECONDS)
        placement.learn(40, INLINE_THRESHOLD_SECONDS / 1000)
    assert placement.is_inline(40)
    assert not placement.is_inline(4000)


def test_a_size_that_is_nearly_short_enough_is_tried_now_and_then() -> None:
    """Times away from the loop hold the way there and back, too; what is far too long is never tried."""
    placement = Placement.measured(2 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=True)
    placement.learn(40, 2 * INLINE_THRESHOLD_SECONDS)
    assert sum(placement.is_inline(40) for _ in range(1000)) == 7
    for _ in range(100):
        placement.learn(40, 20 * INLINE_THRESHOLD_SECONDS)
    assert not any(placement.is_inline(40) for _ in range(1000))


def test_one_short_run_on_the_loop_brings_a_size_back() -> None:
    """What it takes elsewhere has the way there and back in it, and under load much more than that."""
    placement = Placement.measured(2 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=True)
    assert not placement.learn(40, INLINE_THRESHOLD_SECONDS / 10)
    assert placement.learn(40, INLINE_THRESHOLD_SECONDS / 10, on_loop=True)
    assert placement.is_inline(40)


def test_what_must_not_run_on_the_loop_learns_nothing() -> None:
    """However short it is."""
    placement = Placement.away()
    assert not any(placement.learn(40, 0.0) for _ in range(100))
    assert not placement.is_inline(0)


async def test_loads_run_in_threads_and_can_be_abandoned() -> None:
    """A load runs beside the event loop, gives its result, and does not hold up a cancelled caller."""
    assert await run_load(threading.current_thread) is not threading.current_thread()
    release = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await run_load(lambda: release.wait(WAIT_SECONDS))
    assert scope.cancelled_caught
    release.set()


async def test_errors_of_loads_come_out() -> None:
    """What the work raises is raised to the caller."""

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await run_load(fail)


def test_loads_abandoned_at_the_end_of_a_run_do_not_block_the_next() -> None:
    """Each run of the event loop has all its places for loads, whatever an earlier run left behind."""
    release = threading.Event()

    async def abandon() -> None:
        with trio.move_on_after(0.01):
            await run_load(lambda: release.wait(WAIT_SECONDS))

    async def load() -> None:
        with trio.fail_after(WAIT_SECONDS):
            assert await run_load(lambda: 1) == 1

    for _ in range(LOADS_AT_ONCE):
        trio.run(abandon)
    trio.run(load)
    release.set()
