"""How long to wait before something that failed, or did not last, is tried again: longer each time, up to a bound."""

from __future__ import annotations

import math


class Backoff:
    """The pauses after failures in a row.

    Nothing here waits: callers sleep, schedule or refuse for as long as they are told.

    Args:
        first_seconds: the pause after the first failure.
        longest_seconds: no pause is longer.
        stable_seconds: what has lived longer than that before it failed begins again with the first pause.
        factor: how much longer each pause is than the one before; 1 for pauses that stay the same.
    """

    __slots__ = ("_factor", "_first", "_longest", "_next", "_stable")

    def __init__(
        self,
        first_seconds: float = 1.0,
        longest_seconds: float = 60.0,
        stable_seconds: float = math.inf,
        *,
        factor: float = 2.0,
    ) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self._stable = stable_seconds
        self._factor = factor
        self._next = first_seconds

    def seconds_after(self, lived_seconds: float = 0) -> float:
        """Note a failure, of something that had lived so long, and give the pause that is due."""
        if lived_seconds > self._stable:
            self.reset()
        seconds = self._next
        self._next = min(seconds * self._factor, self._longest)
        return seconds

    def reset(self) -> None:
        """Note a success: the next failure is the first one again."""
        self._next = self._first
