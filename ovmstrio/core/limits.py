"""How many requests may be in flight at once."""

from __future__ import annotations

from typing import Protocol

from ovmstrio.core.errors import TooManyRequests

__all__ = ["ConcurrencyLimit", "LocalLimit", "refuse_more"]


class ConcurrencyLimit(Protocol):
    """Counts requests in flight."""

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        ...

    def give_back(self) -> None:
        """Count one less."""
        ...


def refuse_more(maximum: int) -> TooManyRequests:
    """Make the refusal of a request that is one too many."""
    return TooManyRequests(f"{maximum} requests are in flight already, which is max_concurrency; try again later")


class LocalLimit:
    """The limit of a project that one process serves.

    Args:
        maximum: how many may be in flight; 0 for any number.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.in_flight = 0

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        if self._maximum and self.in_flight >= self._maximum:
            raise refuse_more(self._maximum)
        self.in_flight += 1

    def give_back(self) -> None:
        """Count one less."""
        self.in_flight -= 1
