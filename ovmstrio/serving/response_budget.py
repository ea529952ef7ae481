"""Response budget: estimates response sizes and reserves the send budget before inference."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.transport.send_budget import current_connection_budget

if TYPE_CHECKING:
    from ovmstrio.core.service import Service
    from ovmstrio.transport.send_budget import ConnectionBudget

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
        self.share.give_back(self.size)
        if sent and sent != self.size:
            self.room.learn(self.key, sent)


def _static_size(service: Service) -> int:
    """Return the bytes of a service's outputs; 0 if a shape is dynamic."""
    outputs = service.metadata.outputs
    if not all(dim.is_fixed for output in outputs for dim in output.shape):
        return 0
    return sum(output.datatype.itemsize * prod(dim.low for dim in output.shape) for output in outputs)
