"""Event-loop utilization: a trio instrument of the busy share and of the duration of iterations.

Work that would make an iteration too long is deferred by what ``is_late`` says.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter
from typing import Final

import trio

from ovmstrio.core.metric_families import BUCKETS_SECONDS

_WINDOW_SECONDS: Final = 0.1
_LONG_ITERATION_SECONDS: Final = 0.002
_OVERDUE_SECONDS: Final = 2 * _LONG_ITERATION_SECONDS


class LoopUtilization(trio.abc.Instrument):
    """Utilization of one event loop.

    Attributes:
        busy: busy share of the last 100 ms.
        iterations: histogram of iteration times with the bounds ``BUCKETS_SECONDS``.
        iteration_seconds: total time of all iterations.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.iterations = [0] * (len(BUCKETS_SECONDS) + 1)
        self.iteration_seconds = 0.0
        self._window_started = self._wait_started = self._iteration_started = perf_counter()
        self._waited = 0.0

    @property
    def is_late(self) -> bool:
        """True if this iteration is so long that other tasks should run before new work starts."""
        return perf_counter() - self._iteration_started > _LONG_ITERATION_SECONDS

    @property
    def is_overdue(self) -> bool:
        """True if this iteration is several times longer than allowed."""
        return perf_counter() - self._iteration_started > _OVERDUE_SECONDS

    def before_io_wait(self, timeout: float) -> None:
        """Record the end of an iteration (trio instrument)."""
        del timeout
        now = self._wait_started = perf_counter()
        seconds = now - self._iteration_started
        self.iteration_seconds += seconds
        self.iterations[bisect_left(BUCKETS_SECONDS, seconds)] += 1

    def after_io_wait(self, timeout: float) -> None:
        """Record the start of an iteration (trio instrument)."""
        del timeout
        now = self._iteration_started = perf_counter()
        self._waited += now - self._wait_started
        passed = now - self._window_started
        if passed >= _WINDOW_SECONDS:
            self.busy = 1 - self._waited / passed
            self._window_started, self._waited = now, 0.0


_loop_utilization: Final = trio.lowlevel.RunVar[LoopUtilization]("loop utilization")


def current_loop_utilization() -> LoopUtilization:
    """Return the utilization of this event loop; starts the instrument on first use."""
    try:
        return _loop_utilization.get()
    except LookupError:
        made = LoopUtilization()
        _loop_utilization.set(made)
        trio.lowlevel.add_instrument(made)
        return made
