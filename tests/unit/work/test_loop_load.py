from __future__ import annotations

from time import perf_counter

import pytest
import trio
import trio.lowlevel

from ovmstrio.work import loop_load
from ovmstrio.work.loop_load import LoopLoad, current_loop_load
from ovmstrio.work.placement import FEW_CORES_THRESHOLD_SECONDS, INLINE_THRESHOLD_SECONDS


def test_a_busy_loop_takes_shorter_inferences_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it never waits half as long is short; once it waits again, what was."""
    now = 100.0
    monkeypatch.setattr(loop_load, "perf_counter", lambda: now)
    load = LoopLoad()
    for waits, busy, limit in (
        (0.0, 1.0, INLINE_THRESHOLD_SECONDS / 2),
        (0.1, 0.5, INLINE_THRESHOLD_SECONDS),
        (0.01, 0.95, INLINE_THRESHOLD_SECONDS / 2),
    ):
        load.before_io_wait(1)
        now += waits
        load.after_io_wait(1)
        load.before_io_wait(0)
        now += 0.2 - waits
        load.before_io_wait(0)
        load.after_io_wait(0)
        assert load.busy == pytest.approx(busy)
        assert (load.limit, load.limit_of_work) == (limit, limit)


def test_on_few_cores_a_busy_loop_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inference that left it would come to the same core."""
    now = 100.0
    monkeypatch.setattr(loop_load, "perf_counter", lambda: now)
    load = LoopLoad(cores_are_few=True)
    load.before_io_wait(0)
    now += 0.2
    load.before_io_wait(0)
    load.after_io_wait(0)
    assert load.is_full
    assert load.limit == INLINE_THRESHOLD_SECONDS
    assert load.limit_of_work == FEW_CORES_THRESHOLD_SECONDS


def test_a_turn_that_lasts_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late first, overdue when nobody has cared for that; the next one is young again."""
    now = 100.0
    monkeypatch.setattr(loop_load, "perf_counter", lambda: now)
    load = LoopLoad()
    seen = []
    for passed in (0.0015, 0.001, 0.002):
        now += passed
        seen.append((load.is_late, load.is_overdue))
    assert seen == [(False, False), (True, False), (True, True)]
    load.before_io_wait(0)
    load.after_io_wait(0)
    assert not load.is_late


async def test_each_run_of_the_loop_has_one_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher is the same for all models, and a wait for I/O ends a turn."""
    load = current_loop_load()
    assert current_loop_load() is load
    await trio.lowlevel.checkpoint()
    late = perf_counter() + 60
    monkeypatch.setattr(loop_load, "perf_counter", lambda: late)
    assert load.is_late
    await trio.lowlevel.checkpoint()
    assert not load.is_late
