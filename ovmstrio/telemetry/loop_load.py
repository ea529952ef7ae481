"""How busy the event loop is, and what is short enough for it therefore."""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter
from typing import Final

import trio

from ovmstrio.core.metric_families import BUCKETS_SECONDS
from ovmstrio.util.cores import CORES
from ovmstrio.util.placement import FEW_CORES_THRESHOLD_SECONDS, INLINE_THRESHOLD_SECONDS

__all__ = ["LoopLoad", "current_loop_load"]

_WINDOW_SECONDS: Final = 0.1
_BUSY: Final = 0.9
_FULL: Final = 0.97
_LONG_TURN_SECONDS: Final = 0.002
_OVERDUE_SECONDS: Final = 2 * _LONG_TURN_SECONDS
_BUSY_LIMIT_SECONDS: Final = INLINE_THRESHOLD_SECONDS / 2


class LoopLoad(trio.abc.Instrument):
    """Watches one run of the event loop.

    Args:
        cores_are_few: whether an inference that leaves a busy loop has no core of its own to go to: it would take the
            loop's, and more of it than it saves.

    Attributes:
        limit: inferences that take less are to run on the loop, in seconds.
        limit_of_work: the same of those that are the work of the loop's own thread, rather than of one it waits for.
        busy: the share of the last tenth of a second in which the loop did not wait.
        turns: how many turns of the loop took up to each of ``BUCKETS_SECONDS``, and longer than the last of them; one
            goes from a wait, or a look for what is new, to the next.
        turn_seconds: how long all of them took.
    """

    def __init__(self, *, cores_are_few: bool = False) -> None:
        self.limit = INLINE_THRESHOLD_SECONDS
        self._limit_when_busy = INLINE_THRESHOLD_SECONDS if cores_are_few else _BUSY_LIMIT_SECONDS
        self._cores_are_few = cores_are_few
        self.limit_of_work = FEW_CORES_THRESHOLD_SECONDS if cores_are_few else self.limit
        self.busy = 0.0
        self.turns = [0] * (len(BUCKETS_SECONDS) + 1)
        self.turn_seconds = 0.0
        self._begun = self._waits_since = self._goes_on_since = perf_counter()
        self._waited = 0.0

    @property
    def is_full(self) -> bool:
        """Whether it had next to nothing to wait for lately, as where several callers wait for it all the time."""
        return self.busy > _FULL

    @property
    def is_late(self) -> bool:
        """Whether this turn has lasted so long that whatever else is ready should have its own before more is begun."""
        return perf_counter() - self._goes_on_since > _LONG_TURN_SECONDS

    @property
    def is_overdue(self) -> bool:
        """Whether it has lasted several times as long, by work for which nobody has asked :attr:`is_late`."""
        return perf_counter() - self._goes_on_since > _OVERDUE_SECONDS

    def before_io_wait(self, timeout: float) -> None:
        """Be told by trio that the loop has nothing to do, or looks for more."""
        del timeout
        now = self._waits_since = perf_counter()
        turn = now - self._goes_on_since
        self.turn_seconds += turn
        self.turns[bisect_left(BUCKETS_SECONDS, turn)] += 1

    def after_io_wait(self, timeout: float) -> None:
        """Be told by trio that it goes on."""
        del timeout
        now = self._goes_on_since = perf_counter()
        self._waited += now - self._waits_since
        passed = now - self._begun
        if passed >= _WINDOW_SECONDS:
            self.busy = 1 - self._waited / passed
            self.limit = self._limit_when_busy if self.busy > _BUSY else INLINE_THRESHOLD_SECONDS
            if not self._cores_are_few:
                self.limit_of_work = self.limit
            self._begun, self._waited = now, 0.0


_current: Final = trio.lowlevel.RunVar[LoopLoad]("loop load")


def current_loop_load() -> LoopLoad:
    """Give the one of this run of the loop, which it watches from the first time on."""
    try:
        return _current.get()
    except LookupError:
        made = LoopLoad(cores_are_few=CORES.are_few)
        _current.set(made)
        trio.lowlevel.add_instrument(made)
        return made
