from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.hooks import ServableHooks
from ovmstrio.inference import tuner as tuner_module
from ovmstrio.inference.tuner import (
    FEW_CORES_THRESHOLD_SECONDS,
    FILLING_THRESHOLD_SECONDS,
    INLINE_THRESHOLD_SECONDS,
    CoreSharing,
    ModelTuner,
    Placement,
    recompile_models,
)
from ovmstrio.telemetry.loop_utilization import LoopUtilization
from ovmstrio.util.cores import CoreShare
from tests.support.waits import WAIT_SECONDS

SIZE = 40


class _Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


class _Hooks(ServableHooks):
    def __init__(self) -> None:
        self.places: list[bool] = []

    def set_execution_mode(self, *, inline: bool, changed: bool) -> None:
        assert changed
        self.places.append(inline)


class _Tuner(ModelTuner):
    """A tuner with a clock and a load of its own; the event loop is idle at first."""

    def __init__(self, placement: Placement, clock: _Clock | None = None, **options: Any) -> None:
        self.hooks, self.now, self.load = _Hooks(), clock or _Clock(), LoopUtilization()
        super().__init__(placement, self.hooks, clock=self.now, load=self.load, **options)

    def shown(self) -> str:
        return self.state.value

    def moves(self, seconds: Iterable[float], size: int = SIZE, *, on_loop: bool = False) -> list[bool]:
        """Record times; return the changes of where inferences run."""
        self.hooks.places.clear()
        for each in seconds:
            self.record(size, each, on_loop=on_loop)
        return list(self.hooks.places)


def _measured(seconds: float, *, fixed_shape: bool = True, limit: float | None = None) -> _Tuner:
    return _Tuner(Placement.measured(seconds, SIZE, fixed_shape=fixed_shape, limit=limit))


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> CoreShare:
    share = CoreShare()
    monkeypatch.setattr(tuner_module, "CORES", share)
    return share


# Event loop or queue


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
    assert _measured(seconds, fixed_shape=fixed_shape).is_inline(size) is is_inline


def test_limit_of_inferences_that_fill_the_cores_is_independent_of_the_loop() -> None:
    short, limit = 2 * INLINE_THRESHOLD_SECONDS, FILLING_THRESHOLD_SECONDS
    tuner = _measured(short, limit=limit)
    tuner.load.busy = 1.0
    assert tuner.is_inline(SIZE)
    assert tuner.moves([short] * 200, on_loop=True) == []
    assert tuner.is_inline(SIZE)
    assert tuner.moves([2 * limit] * 200, on_loop=True) == [False]
    assert not tuner.is_inline(SIZE)
    assert not _measured(limit, limit=limit).is_inline(SIZE)


def test_busy_loop_halves_the_limit_of_inferences() -> None:
    tuner = _measured(INLINE_THRESHOLD_SECONDS / 10)
    seconds = 0.75 * INLINE_THRESHOLD_SECONDS
    for busy, moves in ((0.5, []), (0.95, [False]), (0.5, [True]), (1.0, [False])):
        tuner.load.busy = busy
        assert tuner.moves([seconds] * 100) == moves


@pytest.mark.parametrize(
    ("computes_on_loop", "limit"), [(False, INLINE_THRESHOLD_SECONDS), (True, FEW_CORES_THRESHOLD_SECONDS)]
)
def test_full_loop_on_few_cores_keeps_the_limit(many_cores: CoreShare, *, computes_on_loop: bool, limit: float) -> None:
    many_cores.are_few = True
    tuner = _measured(INLINE_THRESHOLD_SECONDS / 10)
    tuner.set_streams(1, computes_on_loop=computes_on_loop)
    for busy in (0.0, 1.0):
        tuner.load.busy = busy
        assert tuner.moves([1.2 * limit] * 200) == []
        assert tuner.moves([1.3 * limit] * 200) == [False]
        assert tuner.moves([0.85 * limit] * 200) == []
        assert tuner.moves([0.75 * limit] * 200) == [True]


def test_size_leaves_the_loop_when_its_times_stay_long_and_returns_when_they_stay_short() -> None:
    tuner = _measured(INLINE_THRESHOLD_SECONDS / 10)
    assert tuner.moves([1.0 if number % 3 == 0 else 1e-6 for number in range(300)]) == []
    assert tuner.is_inline(SIZE)
    assert tuner.moves([2 * INLINE_THRESHOLD_SECONDS] * 100) == [False]
    assert not tuner.is_inline(SIZE)
    assert tuner.moves([INLINE_THRESHOLD_SECONDS] * 200) == []
    assert tuner.moves([INLINE_THRESHOLD_SECONDS / 2] * 100) == [True]
    assert tuner.is_inline(SIZE)
    assert tuner.moves([INLINE_THRESHOLD_SECONDS * 1.1] * 200) == []


def test_time_measured_while_loading_is_corrected_by_later_times() -> None:
    tuner = _measured(50 * INLINE_THRESHOLD_SECONDS, fixed_shape=False)
    assert not tuner.is_inline(SIZE)
    tuner.moves([INLINE_THRESHOLD_SECONDS / 10] * 40)
    assert tuner.is_inline(SIZE)
    assert not tuner.is_inline(4000)


def test_times_are_learnt_per_size() -> None:
    tuner = _measured(INLINE_THRESHOLD_SECONDS / 1000, fixed_shape=False)
    for _ in range(100):
        tuner.record(4000, 10 * INLINE_THRESHOLD_SECONDS, on_loop=False)
        tuner.record(SIZE, INLINE_THRESHOLD_SECONDS / 1000, on_loop=False)
    assert tuner.is_inline(SIZE)
    assert not tuner.is_inline(4000)


def test_size_near_the_threshold_is_tried_on_the_loop_at_times() -> None:
    tuner = _measured(2 * INLINE_THRESHOLD_SECONDS)
    tuner.record(SIZE, 2 * INLINE_THRESHOLD_SECONDS, on_loop=False)
    assert sum(tuner.is_inline(SIZE) for _ in range(1000)) == 7
    tuner.moves([20 * INLINE_THRESHOLD_SECONDS] * 100)
    assert not any(tuner.is_inline(SIZE) for _ in range(1000))


def test_one_short_run_on_the_loop_moves_a_size_back() -> None:
    tuner = _measured(2 * INLINE_THRESHOLD_SECONDS)
    assert tuner.moves([INLINE_THRESHOLD_SECONDS / 10]) == []
    assert tuner.moves([INLINE_THRESHOLD_SECONDS / 10], on_loop=True) == [True]
    assert tuner.is_inline(SIZE)


def test_placement_away_from_the_loop_is_never_inline() -> None:
    tuner = _Tuner(Placement.away())
    assert tuner.moves([0.0] * 100) == []
    assert not tuner.is_inline(0)
    assert not tuner.is_inline_by_default


# Contention


def _filling(clock: _Clock | None = None) -> _Tuner:
    return _Tuner(Placement(float("inf"), limit=FILLING_THRESHOLD_SECONDS), clock)


def test_calls_stay_on_a_loop_with_idle_time() -> None:
    tuner = _filling()
    assert not any(tuner.leaves_contended_loop(0) for _ in range(100))
    assert tuner.shown() == "loop"


def test_calls_leave_a_full_loop_until_few_are_left() -> None:
    tuner = _filling()
    tuner.load.busy = 1.0
    assert tuner.leaves_contended_loop(0)
    assert tuner.shown() == "contended"
    tuner.load.busy = 0.0
    assert all(tuner.leaves_contended_loop(others) for others in [0, 1, 2, 8, 1, 0] * 100)
    assert [tuner.leaves_contended_loop(1) for _ in range(40)].index(False) == 30
    assert tuner.shown() == "loop"


def test_lone_calls_probe_a_loop_that_is_full_of_other_work() -> None:
    clock = _Clock()
    tuner = _filling(clock)
    tuner.load.busy = 1.0
    left = 0
    for _ in range(10_000):
        left += tuner.leaves_contended_loop(0)
        clock.now += 0.001
    assert 250 <= left <= 400


def test_model_that_no_longer_fills_the_cores_is_not_contended() -> None:
    tuner = _filling()
    tuner.load.busy = 1.0
    assert tuner.leaves_contended_loop(0)
    tuner.place(Placement(float("inf")))
    assert tuner.shown() == "loop"


# States


def test_inference_that_blocked_the_loop_keeps_others_off_it_for_a_multiple_of_its_time() -> None:
    clock = _Clock()
    tuner = _Tuner(Placement(float("inf")), clock)
    tuner.record_long(SIZE, clock.now, 0.05, 0.0)
    assert (tuner.shown(), tuner.may_use_loop()) == ("blocked", False)
    clock.now += 25.0
    assert not tuner.may_use_loop()
    clock.now += 0.1
    assert tuner.may_use_loop()
    assert tuner.shown() == "loop"


def test_long_inference_whose_cpu_time_is_unknown_does_not_block_the_loop() -> None:
    tuner = _Tuner(Placement(float("inf")))
    tuner.record_long(SIZE, tuner.now(), 0.05, None)
    assert tuner.shown() == "loop"
    assert tuner.cpu_timings_left


def test_state_of_queued_inferences_names_streams_and_their_loss() -> None:
    clock = _Clock()
    tuner = _Tuner(Placement.away(), clock)
    assert tuner.shown() == "queue"
    tuner.set_streams(2, computes_on_loop=False)
    assert tuner.shown() == "streams"
    tuner.lose_streams()
    tuner.set_streams(1, computes_on_loop=False)
    assert tuner.shown() == "reduced"
    clock.now += 30
    assert tuner.wants_recompilation()
    tuner.set_streams(2, computes_on_loop=False)
    tuner.finish_recompilation(1, is_pinned=None, is_bound=False, was_shared=False)
    assert tuner.shown() == "streams"


async def test_recovery_returns_to_the_state_before_or_to_one_entered_meanwhile() -> None:
    tuner = _filling()
    tuner.load.busy = 1.0
    assert tuner.leaves_contended_loop(0)
    assert [tuner.begin_recovery(), tuner.begin_recovery()] == [True, False]
    assert (tuner.shown(), tuner.failures, tuner.is_healthy) == ("recovering", 1, False)
    assert tuner.leaves_contended_loop(0)
    assert not tuner.may_use_loop()
    tuner.end_recovery()
    assert (tuner.shown(), tuner.is_healthy) == ("contended", True)
    tuner.begin_recovery()
    tuner.block_loop()
    assert tuner.shown() == "recovering"
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tuner.wait_healthy)
            await trio.testing.wait_all_tasks_blocked()
            tuner.end_recovery()
    assert tuner.shown() == "blocked"
    tuner.unblock_loop()
    assert tuner.shown() == "loop"


# Concurrency


def _choosing(most: int, **options: Any) -> _Tuner:
    return _Tuner(Placement.away(), max_concurrency=most, **options)


def _look(tuner: _Tuner, *, at_once: float, busy: float = 0.9, seconds: float = 5.0) -> int:
    for _ in range(round(busy * seconds / 0.01)):
        tuner.record_concurrency(at_once, 0.01)
    tuner.now.now += seconds
    assert tuner.wants_recompilation() is (tuner.target != tuner.concurrency)
    return tuner.target


def _follow(tuner: _Tuner, **calls: float) -> int:
    target = _look(tuner, **calls)
    tuner.finish_recompilation(target, is_pinned=None, is_bound=False, was_shared=False)
    assert tuner.concurrency == target
    return target


@pytest.mark.parametrize(
    ("at_once", "busy", "wanted"),
    [(1, 0.99, 1), (1.5, 0.99, 1), (2, 0.99, 2), (3, 0.7, 3), (32, 0.99, 4), (32, 0.3, 1), (2, 0.0, 1)],
)
def test_concurrency_follows_concurrent_calls_of_a_busy_device(at_once: float, busy: float, wanted: int) -> None:
    assert _look(_choosing(4), at_once=at_once, busy=busy) == wanted


def test_concurrency_falls_to_one_after_a_minute_of_lone_calls() -> None:
    tuner = _choosing(4)
    _follow(tuner, at_once=8)
    assert [_look(tuner, at_once=1) for _ in range(11)] == [4] * 11
    assert _look(tuner, at_once=2, busy=0.1) == 4
    assert [_look(tuner, at_once=1) for _ in range(12)] == [4] * 11 + [1]


def test_concurrency_falls_to_one_after_an_idle_minute() -> None:
    tuner = _choosing(2)
    _follow(tuner, at_once=2)
    assert _look(tuner, at_once=0, busy=0, seconds=59) == 2
    assert _look(tuner, at_once=0, busy=0, seconds=2) == 1


def test_concurrency_rises_once_concurrent_calls_have_doubled() -> None:
    tuner = _choosing(16)
    assert _follow(tuner, at_once=4) == 4
    assert [_look(tuner, at_once=at_once) for at_once in (6, 7, 8)] == [4, 4, 8]


def test_short_calls_have_one_thread_until_long_calls_take_most_of_the_time() -> None:
    tuner = _choosing(4, is_for_loop=True)

    def look(short: int, long: int, at_once: float = 1) -> int:
        for _ in range(short):
            tuner.record_concurrency(1, 0.0002)
        for _ in range(long):
            tuner.record_concurrency(at_once, 0.01)
        return _follow(tuner, at_once=0, busy=0)

    assert [look(1000, 0), look(0, 7), look(1000, 19), look(1000, 21)] == [0, 0, 0, 1]
    assert [look(1000, 0) for _ in range(12)] == [1] * 11 + [0]
    assert [look(0, 400, at_once=3), look(1000, 10)] == [3, 3]
    assert [look(0, 0) for _ in range(11)] == [*[3] * 10, 0]


def test_calls_that_are_long_on_one_thread_keep_all_cores() -> None:
    tuner = _choosing(1, cores=4, is_for_loop=True)
    for _ in range(40):
        for _ in range(100):
            tuner.record_concurrency(1, 0.003 if tuner.concurrency == 0 else 0.0006)
        assert _follow(tuner, at_once=0, busy=0) == 1


def test_concurrency_is_kept_for_good_once_the_model_could_not_be_recompiled() -> None:
    tuner = _choosing(4)
    assert _look(tuner, at_once=4) == 4
    tuner.fail_recompilation()
    assert (tuner.max_concurrency, tuner.wants_recompilation(), tuner.concurrency) == (0, False, 1)


# Streams lost to a failure


def _of_streams() -> _Tuner:
    tuner = _Tuner(Placement.away())
    tuner.set_streams(2, computes_on_loop=False)
    return tuner


def _lose_and_restore(tuner: _Tuner) -> int:
    """Lose streams, and restore them when they are due; return the seconds until then."""
    tuner.lose_streams()
    assert tuner.has_lost_streams
    seconds = _seconds_until_due(tuner)
    tuner.finish_recompilation(1, is_pinned=None, is_bound=False, was_shared=False)
    assert (tuner.has_lost_streams, tuner.wants_recompilation()) == (False, False)
    return seconds


def _seconds_until_due(tuner: _Tuner) -> int:
    seconds = 0
    while not tuner.wants_recompilation():
        seconds += 1
        tuner.now.now += 1
    return seconds


def test_pause_of_lost_streams_doubles_up_to_an_hour_and_is_reset_after_ten_minutes() -> None:
    tuner = _of_streams()
    pauses = [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert [_lose_and_restore(tuner) for _ in range(9)] == pauses
    tuner.now.now += 601
    assert [_lose_and_restore(tuner) for _ in range(2)] == [30, 60]
    # Streams whose compilation failed stay lost.
    tuner = _of_streams()
    tuner.lose_streams()
    for pause in pauses:
        assert _seconds_until_due(tuner) == pause
        tuner.fail_recompilation()


def test_another_failure_restarts_the_pause_of_lost_streams() -> None:
    tuner = _of_streams()
    tuner.lose_streams()
    tuner.now.now += 29
    tuner.delay_streams()
    assert _seconds_until_due(tuner) == 30


# Cores shared by models


class _Model:
    """A model that takes a second to compile again, and keeps the times of its compilations."""

    def __init__(self, cores: CoreShare, *, is_pinned: bool | None, obeys: bool = True, weight_bytes: int = 0) -> None:
        self.tuner = _choosing(8, is_pinned=is_pinned, weight_bytes=weight_bytes)
        self.tuner.recompile = WeakMethod(self.recompile)
        self.compiled_at: list[float] = []
        self._cores = cores
        self._obeys = obeys
        self._begin = trio.current_time()
        cores.users.add(self.tuner)

    @property
    def is_pinned(self) -> bool | None:
        return self.tuner.is_pinned

    def serve_calls(self, at_once: int) -> None:
        self.tuner.now.now += 1
        self.tuner.record_concurrency(at_once, 1.0)

    async def recompile(self) -> None:
        self.compiled_at.append(trio.current_time() - self._begin)
        await trio.sleep(1)
        tuner, is_shared = self.tuner, self._cores.is_shared
        is_bound = not is_shared if self._obeys else bool(tuner.is_pinned)
        tuner.finish_recompilation(tuner.target, is_pinned=tuner.is_pinned, is_bound=is_bound, was_shared=True)


@asynccontextmanager
async def _sharing(
    cores: CoreShare, sharing: CoreSharing = "auto", room: Callable[[], float] = lambda: 1e9
) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(recompile_models, sharing, cores, room=room))
        yield
        nursery.cancel_scope.cancel()


async def test_pinned_model_is_unpinned_some_seconds_after_another_is_loaded(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores):
        first = _Model(many_cores, is_pinned=True)
        await trio.sleep(60)
        assert first.compiled_at == []
        second = _Model(many_cores, is_pinned=False)
        await trio.sleep(600)
    (compiled,) = first.compiled_at
    assert 70 <= compiled <= 80
    assert (first.is_pinned, second.compiled_at) == (False, [])


async def test_unloaded_model_is_not_kept_in_memory(autojump_clock: MockClock, many_cores: CoreShare) -> None:
    async with _sharing(many_cores):
        first, second = _Model(many_cores, is_pinned=True), _Model(many_cores, is_pinned=False)
        await trio.sleep(60)
        assert len(first.compiled_at) == 1
        del first
        assert list(many_cores.users) == [second.tuner]
        await trio.sleep(200)
    assert second.is_pinned


async def test_models_that_are_replaced_quickly_are_not_compiled_again(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores):
        first = _Model(many_cores, is_pinned=True)
        for _ in range(10):
            second = _Model(many_cores, is_pinned=True)
            await trio.sleep(4)
            many_cores.users.discard(second.tuner)
            await trio.sleep(16)
    assert first.compiled_at == second.compiled_at == []


async def test_last_service_is_pinned_two_minutes_after_the_others_are_unloaded(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores):
        many_cores.services = 2
        last = _Model(many_cores, is_pinned=False)
        await trio.sleep(50)
        many_cores.services = 1
        await trio.sleep(100)
        assert last.compiled_at == []
        await trio.sleep(60)
    assert len(last.compiled_at) == 1
    assert last.is_pinned


async def test_models_are_compiled_one_at_a_time_and_once_even_if_they_stay_pinned(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores):
        stubborn = [_Model(many_cores, is_pinned=True, obeys=False) for _ in range(2)]
        configured_by_user = _Model(many_cores, is_pinned=None)
        await trio.sleep(600)
    (first,), (second,) = (each.compiled_at for each in stubborn)
    assert abs(first - second) >= 1
    assert configured_by_user.compiled_at == []


async def test_model_that_does_not_fit_into_memory_twice_stays_pinned(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores, room=lambda: 10.0):
        large, small = (_Model(many_cores, is_pinned=True, weight_bytes=size) for size in (6, 5))
        await trio.sleep(60)
    assert (large.compiled_at, len(small.compiled_at)) == ([], 1)


async def test_nothing_is_compiled_again_with_sharing_off(autojump_clock: MockClock, many_cores: CoreShare) -> None:
    async with _sharing(many_cores, "off"):
        many_cores.services = 3
        users = [_Model(many_cores, is_pinned=True) for _ in range(2)]
        await trio.sleep(600)
    assert [each.compiled_at for each in users] == [[], []]
    assert not many_cores.is_shared
    many_cores.processes = 2
    assert many_cores.is_shared


async def test_model_whose_calls_need_another_concurrency_is_compiled_again_once(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    async with _sharing(many_cores):
        busy, other = _Model(many_cores, is_pinned=None), _Model(many_cores, is_pinned=None)
        await trio.sleep(21)
        busy.serve_calls(4)
        await trio.sleep(60)
    (compiled,) = busy.compiled_at
    assert 21 <= compiled <= 26
    assert (busy.tuner.concurrency, other.compiled_at) == (4, [])


async def test_free_memory_is_read_once_for_a_model_without_room(
    autojump_clock: MockClock, many_cores: CoreShare
) -> None:
    rooms: list[float] = []

    def room() -> float:
        rooms.append(10.0)
        return 10.0

    async with _sharing(many_cores, room=room):
        large = _Model(many_cores, is_pinned=None, weight_bytes=6)
        large.serve_calls(4)
        await trio.sleep(60)
    assert (large.compiled_at, len(rooms)) == ([], 1)


def test_threads_are_not_pinned_on_few_cores() -> None:
    few, many = CoreShare(2), CoreShare(3)
    assert few.is_shared
    assert not many.is_shared
    few.chooses = False
    assert not few.is_shared
