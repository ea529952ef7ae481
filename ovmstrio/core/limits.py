"""Concurrency limits of services and the admission ticket of a call."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol

from ovmstrio.core.errors import TooManyRequests


class Limit(NamedTuple):
    """Concurrency limit (0 for unlimited), queue limit, and longest wait in seconds (None for that of the server)."""

    max_concurrency: int = 0
    max_queue: int = 0
    max_queue_time: float | None = None


NO_LIMIT: Final = Limit()


class AdmissionTicket(Protocol):
    """Admission ticket of a running call."""

    @property
    def waited_seconds(self) -> float:
        """Time the call waited for admission."""

    def hold(self, limit: ConcurrencyLimit) -> None:
        """Count the call in a limit of its service too, until passed on or released.

        Raises:
            TooManyRequests: the limit is reached.
        """

    def pass_on(self) -> ConcurrencyLimit | None:
        """Transfer the held limit to the caller; None if there is none."""

    def release(self) -> None:
        """Release the ticket; idempotent."""


def release_current_ticket() -> None:
    """Release the ticket of the running task's call, if there is one."""
    place = current_ticket.get()
    if place is not None:
        current_ticket.set(None)
        place.release()


current_ticket: Final[ContextVar[AdmissionTicket | None]] = ContextVar("current_ticket", default=None)
"""Ticket of the running task's call, if it was admitted before its body was read."""


class ConcurrencyLimit(Protocol):
    """A concurrency limit without queue."""

    @property
    def maximum(self) -> int:
        """Maximum number of running requests; 0 for unlimited."""

    def acquire(self) -> None:
        """Count a started request; raises TooManyRequests if the limit is reached."""

    def release(self) -> None:
        """Count a finished request."""


def too_many_requests(maximum: int) -> TooManyRequests:
    """Return the error for a request above the limit."""
    return TooManyRequests(f"{maximum} requests are in flight already, which is max_concurrency; try again later")


class LocalLimit:
    """Concurrency limit within one process; ``maximum`` 0 means unlimited."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.in_flight = 0

    def acquire(self) -> None:
        """Count a started request; raises TooManyRequests if the limit is reached."""
        if self.maximum and self.in_flight >= self.maximum:
            raise too_many_requests(self.maximum)
        self.in_flight += 1

    def release(self) -> None:
        """Count a finished request."""
        self.in_flight -= 1


def make_local_limit(maximum: int, name: str) -> LocalLimit | None:
    """Return the limit of a project served by one process; None if unlimited."""
    del name
    return LocalLimit(maximum) if maximum else None
