"""How many requests may be in flight at once."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol

from ovmstrio.core.errors import TooManyRequests

__all__ = [
    "NO_LIMIT",
    "CallPlace",
    "ConcurrencyLimit",
    "Limit",
    "LocalLimit",
    "current_place",
    "leave_place",
    "local_limit",
    "refuse_more",
]


class Limit(NamedTuple):
    """How many calls may be under way, 0 for any number, and how many more may wait for that."""

    max_concurrency: int = 0
    max_queue: int = 0


NO_LIMIT: Final = Limit()


class CallPlace(Protocol):
    """A call's place among those that are under way."""

    @property
    def waited_seconds(self) -> float:
        """How long it was waited for."""
        ...

    def hold(self, limit: ConcurrencyLimit) -> None:
        """Have the call count among those that its service allows itself, too, until that is passed on or given back.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        ...

    def pass_on(self) -> ConcurrencyLimit | None:
        """Leave it to the caller to give back what is held; None if there is nothing."""
        ...

    def release(self) -> None:
        """Give it back; may be called again."""
        ...


def leave_place() -> None:
    """Give back the place of the call that the running task serves, if it has one."""
    place = current_place.get()
    if place is not None:
        current_place.set(None)
        place.release()


current_place: Final[ContextVar[CallPlace | None]] = ContextVar("current_place", default=None)
"""The place of the call that the running task serves, where it was taken before the call's body was read."""


class ConcurrencyLimit(Protocol):
    """Counts the requests that a service has in flight, wherever they are; nobody waits for it."""

    @property
    def maximum(self) -> int:
        """How many there may be; 0 for any number."""
        ...

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
        self.maximum = maximum
        self.in_flight = 0

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        if self.maximum and self.in_flight >= self.maximum:
            raise refuse_more(self.maximum)
        self.in_flight += 1

    def give_back(self) -> None:
        """Count one less."""
        self.in_flight -= 1


def local_limit(maximum: int, name: str) -> LocalLimit | None:
    """Make the limit of a project that one process serves; None if there is none, for then nobody counts."""
    del name
    return LocalLimit(maximum) if maximum else None
