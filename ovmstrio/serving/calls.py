"""Response budgets, and observed calls of services that take no tensors, such as text models and handlers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.events import CANCELLED
from ovmstrio.transport.send_budget import current_connection_budget

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.service import Service
    from ovmstrio.serving.instances import Lease
    from ovmstrio.transport.send_budget import ConnectionBudget

# ----------------------------------------------------------------------
# Response budget: estimates response sizes and reserves the send budget before inference
# ----------------------------------------------------------------------

_UNKNOWN_SECONDS: Final = 1.0
"""Longest wait for budget when the size is unknown: such calls may be waiting for each other."""
_DECAY: Final = 6
"""A smaller response lowers the estimate by ``estimate >> 6``."""


class ResponseBudget:
    """Estimates response sizes from previous responses.

    Attributes:
        sizes: expected bytes by service, or by service and method for calls without tensors.
    """

    __slots__ = ("sizes",)

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def take(self, share: ConnectionBudget, key: str) -> int:
        """Reserve the expected response size without waiting; return 0 if that is impossible or the size is unknown."""
        size = self.sizes.get(key, 0)
        return size if size and share.take(size) else 0

    async def wait(self, share: ConnectionBudget, key: str, service: Service | None = None) -> int:
        """Reserve the expected response size in a client's share, waiting for budget; return the reserved bytes.

        The size of a first response comes from fixed output shapes of ``service``, otherwise it is
        ``share.default_response_bytes``.
        """
        size = self.sizes.get(key)
        if size is None:
            size = 0 if service is None else _static_size(service)
        if size:
            await share.wait(size)
            return size
        size = share.default_response_bytes
        with trio.move_on_after(_UNKNOWN_SECONDS):
            await share.wait(size)
            return size
        share.add(size)
        return size

    async def enter(self, key: str, *, is_stream: bool) -> ResponseReservation | None:
        """Reserve the response of a call without tensors; None if there is nothing to release.

        Nothing is reserved for a stream, which may be idle for long; it only waits for free budget.
        """
        share = current_connection_budget.get()
        if share is None:
            return None
        if is_stream:
            await share.wait(0)
            return None
        size = self.take(share, key) or await self.wait(share, key)
        return ResponseReservation(self, share, key, size)

    def learn(self, key: str, size: int) -> None:
        """Update the estimate with a response size."""
        known = self.sizes.get(key, 0)
        self.sizes[key] = max(size, known - (known >> _DECAY))


class ResponseReservation(NamedTuple):
    """The reserved budget of one call's response."""

    room: ResponseBudget
    share: ConnectionBudget
    key: str
    size: int

    def leave(self, sent: int) -> None:
        """Release the reservation; ``sent`` is the response size, 0 if unknown."""
        self.share.release(self.size)
        if sent and sent != self.size:
            self.room.learn(self.key, sent)


def _static_size(service: Service) -> int:
    """Return the bytes of a service's outputs; 0 if a shape is dynamic."""
    outputs = service.metadata.outputs
    if not all(dim.is_fixed for output in outputs for dim in output.shape):
        return 0
    return sum(output.datatype.itemsize * prod(dim.low for dim in output.shape) for output in outputs)


# ----------------------------------------------------------------------
# Observed calls: raw HTTP, gRPC services, and generative services
# ----------------------------------------------------------------------

EndCall = Callable[["CallEvent", BaseException | None], None]


class ObservedCall:
    """One call, which ends with its ``with`` block, or later if the block hands it over.

    Attributes:
        event: the call's event; the caller sets its sizes, and its code if a failure becomes a response.
    """

    __slots__ = ("_end", "_is_handed_over", "_lease", "_reservation", "call_types", "event", "service")

    def __init__(self, lease: Lease, event: CallEvent, end: EndCall, room: ResponseReservation | None = None) -> None:
        self.service: Service = lease.servable
        self.call_types = lease.call_types
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
