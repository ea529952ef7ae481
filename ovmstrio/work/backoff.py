"""How long to wait before something that failed is tried again: longer each time, up to a bound."""

from __future__ import annotations

__all__ = ["Backoff"]


class Backoff:
    """The pauses after failures in a row.

    Nothing here waits: callers sleep, schedule or refuse for as long as they are told.

    Args:
        first_seconds: the pause after the first failure.
        longest_seconds: no pause is longer.
        factor: how much longer each pause is than the one before; 1 for pauses that stay the same.
    """

    __slots__ = ("_factor", "_first", "_longest", "_next")

    def __init__(self, first_seconds: float = 1.0, longest_seconds: float = 60.0, factor: float = 2.0) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self._factor = factor
        self._next = first_seconds

    def pause(self) -> float:
        """Note a failure, and give the seconds to wait after it."""
        seconds = self._next
        self._next = min(seconds * self._factor, self._longest)
        return seconds

    def reset(self) -> None:
        """Note a success: the next failure is the first one again."""
        self._next = self._first
