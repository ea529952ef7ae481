"""Counting events a second, for frames that cost more to answer than to send."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RateLimit"]


class RateLimit:
    """Allow at most ``limit`` events in each second that begins with an event."""

    __slots__ = ("_clock", "_count", "_limit", "_window_start")

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._count = 0
        self._window_start = float("-inf")

    def exceeded(self) -> bool:
        """Count one event and say whether it is one too many."""
        now = self._clock()
        if now - self._window_start >= 1.0:
            self._window_start = now
            self._count = 0
        self._count += 1
        return self._count > self._limit

    def forgive(self) -> None:
        """Forget what was counted."""
        self._count = 0
