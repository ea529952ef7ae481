"""Streams that a model gave up for one after a failure: when it is to have them again.

Nobody knows which of several streams a failure has spoiled (``docs/openvino_defects.md``).  One stream is mended in no
time, however often requests fail; several would have to be compiled again each time.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovmstrio.work.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LostStreams"]

_FIRST_SECONDS: Final = 30.0
_LONGEST_SECONDS: Final = 3600.0
_STABLE_SECONDS: Final = 600.0
"""Who fails less often than that is forgiven each time as if it were the first one."""


class LostStreams:
    """Tells when nothing has failed for long enough: longer each time that they were lost soon after.

    Args:
        clock: gives seconds.
    """

    __slots__ = ("_backoff", "_clock", "_due_at", "_had_since", "_pause")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_SECONDS, _LONGEST_SECONDS, _STABLE_SECONDS)
        self._had_since = clock()
        self._pause = 0.0
        self._due_at = math.inf

    @property
    def are_lost(self) -> bool:
        """Whether the model has one stream in the place of several."""
        return self._pause > 0

    @property
    def are_due(self) -> bool:
        """Whether it is to have them again now."""
        return self.are_lost and self._clock() >= self._due_at

    def lose(self) -> float:
        """Note that they are given up, or could not be had again; gives how long nothing must fail until they are due.

        Returns:
            Seconds.
        """
        now = self._clock()
        self._pause = self._backoff.seconds_after(0.0 if self.are_lost else now - self._had_since)
        self._due_at = now + self._pause
        return self._pause

    def put_off(self) -> None:
        """Note a failure while they are lost: the time begins again."""
        if self.are_lost:
            self._due_at = self._clock() + self._pause

    def regain(self) -> None:
        """Note that the model has them."""
        if self.are_lost:
            self._pause, self._due_at, self._had_since = 0.0, math.inf, self._clock()
