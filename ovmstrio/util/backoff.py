"""Exponential backoff: pauses between retries, up to a maximum."""

from __future__ import annotations

import math


class Backoff:
    """Pauses after consecutive failures.

    The class does not wait: callers sleep, schedule or refuse for the returned time.

    Args:
        first_seconds: the pause after the first failure.
        longest_seconds: the maximum pause.
        stable_seconds: a lifetime before a failure above which the pauses start from the first again.
        factor: the factor between two pauses; 1 for constant pauses.
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
        """Record a failure after ``lived_seconds`` of life and return the pause before the next try."""
        if lived_seconds > self._stable:
            self.reset()
        seconds = self._next
        self._next = min(seconds * self._factor, self._longest)
        return seconds

    def reset(self) -> None:
        """Record a success: the next failure gets the first pause."""
        self._next = self._first
