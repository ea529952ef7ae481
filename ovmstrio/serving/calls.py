"""Observed calls of services that take no tensors: raw HTTP, gRPC services, and generative services."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ovmstrio.core.events import CANCELLED

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.service import Service
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.response_budget import ResponseReservation

EndCall = Callable[["CallEvent", BaseException | None], None]


class ObservedCall:
    """One call, which ends with its ``with`` block, or later if the block hands it over.

    Attributes:
        event: the call's event; the caller sets its sizes, and its code if a failure becomes a response.
    """

    __slots__ = ("_end", "_is_handed_over", "_lease", "_reservation", "event", "service", "takes")

    def __init__(self, lease: Lease, event: CallEvent, end: EndCall, room: ResponseReservation | None = None) -> None:
        self.service: Service = lease.servable
        self.takes = lease.takes
        self.event = event
        self._lease = lease
        self._end = end
        self._reservation = room
        self._is_handed_over = False

    def hand_over(self) -> Callable[[], None]:
        """Keep the call open after its block, for the rest of a response; the returned function ends it."""
        self._is_handed_over = True
        self._release_reservation(0)
        return self._finish

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not self._is_handed_over:
            self._finish(error)

    def _release_reservation(self, sent: int) -> None:
        room, self._reservation = self._reservation, None
        if room is not None:
            room.leave(sent)

    def _finish(self, error: BaseException | None = None) -> None:
        self._release_reservation(self.event.sent)
        try:
            self._end(self.event, error)
        finally:
            self._lease.release()


def error_label(error: BaseException) -> str:
    """Return the metric label of an error; cancellation has its own, also in groups."""
    cancelled = isinstance(error, trio.Cancelled) or (
        isinstance(error, BaseExceptionGroup) and error.split(trio.Cancelled)[1] is None
    )
    return CANCELLED if cancelled else type(error).__name__
