from __future__ import annotations

import os
import threading
from pathlib import Path
from time import perf_counter

import pytest
import trio
import trio.lowlevel

from ovmstrio.inference.tuner import ConcurrencyEstimator, ContentionSwitch
from ovmstrio.telemetry import loop_load
from ovmstrio.telemetry.loop_load import LoopLoad, current_loop_load
from ovmstrio.util.cores import CoreShare, usable_cores
from ovmstrio.util.placement import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    LOADS_AT_ONCE,
    Placement,
    run_load,
)
from tests.support.waits import WAIT_SECONDS


@pytest.mark.parametrize(
    ("seconds", "fixed_shape", "size", "is_inline"),
    [
        pytest.param(INLINE_THRESHOLD_SECONDS / 2, True, 40, True, id="short"),
        pytest.param(INLINE_THRESHOLD_SECONDS, True, 0, False, id="at the threshold"),
        pytest.param(INLINE_THRESHOLD_SECONDS / 10, False, 399, True, id="growing, below the threshold"),
        pytest.param(INLINE_THRESHOLD_SECONDS / 10, False, 401, False, id="growing, above the threshold"),
    ],
)
def test_measured_time_decides_whether_inferences_run_inline(
    seconds: float, size: int, *, fixed_shape: bool, is_inline: bool
) -> None:
    assert Placement.measured(seconds, 40, fixed_shape=fixed_shape).is_inline(size) is is_inline


def test_limit_of_inferences_that_fill_the_cores_is_independent_of_the_loop() -> None:
    short, limit = 2 * INLINE_THRESHOLD_SECONDS, FILLING_THRESHOLD_SECONDS
    placement = Placement.measured(short, 40, fixed_shape=True, limit=limit)
    assert placement.is_inline(40)
    assert not any(placement.learn(40, short, INLINE_THRESHOLD_SECONDS / 2, on_loop=True) for _ in range(200))
    assert placement.is_inline(40)
    assert sum([placement.learn(40, 2 * limit, on_loop=True) for _ in range(200)]) == 1
    assert not placement.is_inline(40)
    assert not Placement.measured(limit, 40, fixed_shape=True, limit=limit).is_inline(40)


def test_size_leaves_the_loop_when_its_times_stay_long_and_returns_when_they_stay_short() -> None:
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


def test_time_measured_while_loading_is_corrected_by_later_times() -> None:
    placement = Placement.measured(50 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=False)
    assert not placement.is_inline(40)
    for _ in range(40):
        placement.learn(40, INLINE_THRESHOLD_SECONDS / 10)
    assert placement.is_inline(40)
    assert not placement.is_inline(4000)


def test_times_are_learnt_per_size() -> None:
    placement = Placement.measured(INLINE_THRESHOLD_SECONDS / 1000, 40, fixed_shape=False)
    for _ in range(100):
        placement.learn(4000, 10 * INLINE_THRESHOLD_SECONDS)
        placement.learn(40, INLINE_THRESHOLD_SECONDS / 1000)
    assert placement.is_inline(40)
    assert not placement.is_inline(4000)


def test_size_near_the_threshold_is_tried_on_the_loop_at_times() -> None:
    placement = Placement.measured(2 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=True)
    placement.learn(40, 2 * INLINE_THRESHOLD_SECONDS)
    assert sum(placement.is_inline(40) for _ in range(1000)) == 7
    for _ in range(100):
        placement.learn(40, 20 * INLINE_THRESHOLD_SECONDS)
    assert not any(placement.is_inline(40) for _ in range(1000))


def test_one_short_run_on_the_loop_moves_a_size_back() -> None:
    placement = Placement.measured(2 * INLINE_THRESHOLD_SECONDS, 40, fixed_shape=True)
    assert not placement.learn(40, INLINE_THRESHOLD_SECONDS / 10)
    assert placement.learn(40, INLINE_THRESHOLD_SECONDS / 10, on_loop=True)
    assert placement.is_inline(40)


def test_placement_away_from_the_loop_is_never_inline() -> None:
    placement = Placement.away()
    assert not any(placement.learn(40, 0.0) for _ in range(100))
    assert not placement.is_inline(0)


async def test_load_runs_in_a_thread_and_may_be_abandoned() -> None:
    assert await run_load(threading.current_thread) is not threading.current_thread()
    release = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await run_load(lambda: release.wait(WAIT_SECONDS))
    assert scope.cancelled_caught
    release.set()
    with pytest.raises(ZeroDivisionError):
        await run_load(lambda: 1 // 0)


def test_abandoned_loads_do_not_block_loads_of_the_next_event_loop() -> None:
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


# Load of the event loop


class _Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(loop_load, "perf_counter", made)
    return made


def _spend_turn(load: LoopLoad, clock: _Clock, *, waited: float) -> None:
    """Record a turn of 0.2 s, in which the loop waited for I/O at first."""
    load.before_io_wait(1)
    clock.now += waited
    load.after_io_wait(1)
    load.before_io_wait(0)
    clock.now += 0.2 - waited
    load.before_io_wait(0)
    load.after_io_wait(0)


def test_full_loop_halves_the_limit_of_inferences(clock: _Clock) -> None:
    load = LoopLoad()
    for waited, busy, limit in ((0.0, 1.0, 0.5), (0.1, 0.5, 1.0), (0.01, 0.95, 0.5)):
        _spend_turn(load, clock, waited=waited)
        assert load.busy == pytest.approx(busy)
        assert load.limit == load.limit_of_work == limit * INLINE_THRESHOLD_SECONDS


def test_full_loop_on_few_cores_keeps_the_limit(clock: _Clock) -> None:
    load = LoopLoad(cores_are_few=True)
    _spend_turn(load, clock, waited=0)
    assert load.is_full
    assert (load.limit, load.limit_of_work) == (INLINE_THRESHOLD_SECONDS, FEW_CORES_THRESHOLD_SECONDS)


def test_long_turn_is_late_and_then_overdue(clock: _Clock) -> None:
    load = LoopLoad()
    seen = []
    for passed in (0.0015, 0.001, 0.002):
        clock.now += passed
        seen.append((load.is_late, load.is_overdue))
    assert seen == [(False, False), (True, False), (True, True)]
    load.before_io_wait(0)
    load.after_io_wait(0)
    assert not load.is_late


async def test_load_is_watched_once_per_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    load = current_loop_load()
    assert current_loop_load() is load
    await trio.lowlevel.checkpoint()
    late = perf_counter() + 60
    monkeypatch.setattr(loop_load, "perf_counter", lambda: late)
    assert load.is_late
    await trio.lowlevel.checkpoint()
    assert not load.is_late


# Demand


def _look(
    check: ConcurrencyEstimator, clock: _Clock, *, at_once: float, busy: float = 0.9, seconds: float = 5.0
) -> int:
    for _ in range(round(busy * seconds / 0.01)):
        check.note(at_once, 0.01)
    clock.now += seconds
    return check.look()


@pytest.mark.parametrize(
    ("at_once", "busy", "wanted"),
    [(1, 0.99, 1), (1.5, 0.99, 1), (2, 0.99, 2), (3, 0.7, 3), (32, 0.99, 4), (32, 0.3, 1), (2, 0.0, 1)],
)
def test_concurrency_follows_concurrent_calls_of_a_busy_device(at_once: float, busy: float, wanted: int) -> None:
    clock = _Clock()
    assert _look(ConcurrencyEstimator(4, clock), clock, at_once=at_once, busy=busy) == wanted


def test_concurrency_falls_to_one_after_a_minute_of_lone_calls() -> None:
    clock = _Clock()
    check = ConcurrencyEstimator(4, clock)
    check.chosen = _look(check, clock, at_once=8)
    assert [_look(check, clock, at_once=1) for _ in range(11)] == [4] * 11
    assert _look(check, clock, at_once=2, busy=0.1) == 4
    assert [_look(check, clock, at_once=1) for _ in range(12)] == [4] * 11 + [1]


def test_concurrency_falls_to_one_after_an_idle_minute() -> None:
    clock = _Clock()
    check = ConcurrencyEstimator(2, clock)
    check.chosen = _look(check, clock, at_once=2)
    assert _look(check, clock, at_once=0, busy=0, seconds=59) == 2
    assert _look(check, clock, at_once=0, busy=0, seconds=2) == 1


def test_concurrency_rises_once_concurrent_calls_have_doubled() -> None:
    clock = _Clock()
    check = ConcurrencyEstimator(16, clock)
    check.chosen = _look(check, clock, at_once=4)
    assert check.chosen == 4
    assert [_look(check, clock, at_once=at_once) for at_once in (6, 7, 8)] == [4, 4, 8]


def test_short_calls_have_one_thread_until_long_calls_take_most_of_the_time() -> None:
    clock = _Clock()
    check = ConcurrencyEstimator(4, clock, is_for_loop=True)

    def look(short: int, long: int, at_once: float = 1) -> int:
        for _ in range(short):
            check.note(1, 0.0002)
        for _ in range(long):
            check.note(at_once, 0.01)
        clock.now += 5.0
        check.chosen = check.look()
        return check.chosen

    assert [look(1000, 0), look(0, 7), look(1000, 19), look(1000, 21)] == [0, 0, 0, 1]
    assert [look(1000, 0) for _ in range(12)] == [1] * 11 + [0]
    assert [look(0, 400, at_once=3), look(1000, 10)] == [3, 3]
    assert [look(0, 0) for _ in range(11)] == [*[3] * 10, 0]


def test_calls_that_are_long_on_one_thread_keep_all_cores() -> None:
    clock = _Clock()
    check = ConcurrencyEstimator(1, clock, cores=4, is_for_loop=True)
    for _ in range(40):
        for _ in range(100):
            check.note(1, 0.003 if check.chosen == 0 else 0.0006)
        clock.now += 5.0
        check.chosen = check.look()
        assert check.chosen == 1


# Crowds


def test_calls_stay_on_a_loop_with_idle_time() -> None:
    crowd = ContentionSwitch(_Clock())
    assert not any(crowd.leaves(0, loop_is_full=False) for _ in range(100))


def test_calls_leave_a_full_loop_until_few_are_left() -> None:
    crowd = ContentionSwitch(_Clock())
    assert crowd.leaves(0, loop_is_full=True)
    assert all(crowd.leaves(others, loop_is_full=False) for others in [0, 1, 2, 8, 1, 0] * 100)
    assert [crowd.leaves(1, loop_is_full=False) for _ in range(40)].index(False) == 30
    assert not crowd.is_there


def test_lone_calls_probe_a_loop_that_is_full_of_other_work() -> None:
    clock = _Clock()
    crowd = ContentionSwitch(clock)
    left = 0
    for _ in range(10_000):
        left += crowd.leaves(0, loop_is_full=True)
        clock.now += 0.001
    assert 250 <= left <= 400


# Cores


@pytest.mark.parametrize(
    ("files", "own", "count"),
    [
        ({}, "", 8),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 8),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "10000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "1600000 100000\n"}, "0::/\n", 8),
        ({"pods/one/cpu.max": "300000 100000\n", "pods/cpu.max": "max 100000\n"}, "0::/pods/one\n", 3),
        ({"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, "0::/pods/one\n", 4),
        ({"pods/other/cpu.max": "100000 100000\n"}, "0::/pods/one\n", 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "2:cpu,cpuacct:/docker/x\n", 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "2:cpu,cpuacct:/docker/x\n", 8),
        ({"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "50000\n"}, "1:cpu:/x\n3:memory:/y\n", 2),
        ({"cpu.max": "nonsense\n"}, "nonsense\n", 8),
    ],
)
def test_cores_are_limited_by_the_cgroup_quota_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups = tmp_path / "groups"
    for name, text in files.items():
        file = groups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    (tmp_path / "own").write_text(own, encoding="ascii")
    assert usable_cores(groups, tmp_path / "own") == count


def test_threads_are_not_bound_on_few_cores() -> None:
    few, many = CoreShare(2), CoreShare(3)
    assert few.is_shared
    assert not many.is_shared
    few.chooses = False
    assert not few.is_shared
