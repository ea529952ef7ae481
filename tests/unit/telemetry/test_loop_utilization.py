from __future__ import annotations

from time import perf_counter

import pytest
import trio
import trio.lowlevel

from ovmstrio.telemetry import loop_utilization
from ovmstrio.telemetry.loop_utilization import LoopUtilization, current_loop_utilization


class _Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(loop_utilization, "perf_counter", made)
    return made


def _spend_turn(load: LoopUtilization, clock: _Clock, *, waited: float) -> None:
    """Record a turn of 0.2 s, in which the loop waited for I/O at first."""
    load.before_io_wait(1)
    clock.now += waited
    load.after_io_wait(1)
    load.before_io_wait(0)
    clock.now += 0.2 - waited
    load.before_io_wait(0)
    load.after_io_wait(0)


def test_busy_share_is_that_of_the_last_turns(clock: _Clock) -> None:
    load = LoopUtilization()
    for waited, busy in ((0.0, 1.0), (0.1, 0.5), (0.01, 0.95)):
        _spend_turn(load, clock, waited=waited)
        assert load.busy == pytest.approx(busy)


def test_long_turn_is_late_and_then_overdue(clock: _Clock) -> None:
    load = LoopUtilization()
    seen = []
    for passed in (0.0015, 0.001, 0.002):
        clock.now += passed
        seen.append((load.is_late, load.is_overdue))
    assert seen == [(False, False), (True, False), (True, True)]
    load.before_io_wait(0)
    load.after_io_wait(0)
    assert not load.is_late


async def test_load_is_watched_once_per_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    load = current_loop_utilization()
    assert current_loop_utilization() is load
    await trio.lowlevel.checkpoint()
    late = perf_counter() + 60
    monkeypatch.setattr(loop_utilization, "perf_counter", lambda: late)
    assert load.is_late
    await trio.lowlevel.checkpoint()
    assert not load.is_late
