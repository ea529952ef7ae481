"""Room for answers before they are computed: how large those of a service will be, and who has to wait."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.transport.send_budget import current_share

if TYPE_CHECKING:
    from ovmstrio.core.service import Service
    from ovmstrio.transport.send_budget import PendingShare

__all__ = ["AnswerRoom", "Room"]

_UNKNOWN_SECONDS: Final = 1.0
"""How long calls wait because of answers whose sizes nobody knows: they may be waiting for each other."""
_DECAY: Final = 6
"""Smaller answers lower what is expected by this power of a half each."""


class AnswerRoom:
    """Knows how large the answers of services are.

    Attributes:
        sizes: bytes that an answer is expected to have, by service and, of those that take no tensors, by method.
    """

    __slots__ = ("sizes",)

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def take(self, share: PendingShare, key: str) -> int:
        """Count an answer that is to come as :meth:`wait` does; 0 if nothing is counted, as one may have to wait."""
        size = self.sizes.get(key, 0)
        return size if size and share.take(size) else 0

    async def wait(self, share: PendingShare, key: str, service: Service | None = None) -> int:
        """Count an answer that is to come in the share of its client, once there is room; tell its expected size.

        Args:
            share: the client's.
            key: whose answers are alike.
            service: what gives tensors of the sizes that its metadata tells; None if it gives something else.

        Cancellation: while there is no room; nothing is counted then.
        """
        size = self.sizes.get(key)
        if size is None:
            size = 0 if service is None else _static_size(service)
        if size:
            await share.wait(size)
            return size
        size = share.unknown_bytes
        with trio.move_on_after(_UNKNOWN_SECONDS):
            await share.wait(size)
            return size
        share.add(size)
        return size

    async def enter(self, key: str, *, is_stream: bool) -> Room | None:
        """Wait for room for the answer of a call that takes no tensors; None if none has to be given back.

        Nothing is counted for a stream, which may last and have nothing to say.

        Cancellation: while there is no room; nothing is counted then.
        """
        share = current_share.get()
        if share is None:
            return None
        if is_stream:
            await share.wait(0)
            return None
        size = self.take(share, key) or await self.wait(share, key)
        return Room(self, share, key, size)

    def learn(self, key: str, size: int) -> None:
        """Note how large an answer was."""
        known = self.sizes.get(key, 0)
        self.sizes[key] = max(size, known - (known >> _DECAY))


class Room(NamedTuple):
    """What is counted for the answer of one call."""

    room: AnswerRoom
    share: PendingShare
    key: str
    size: int

    def leave(self, sent: int) -> None:
        """Count it no more; ``sent`` is how large the answer was, 0 if that is not known."""
        self.share.give_back(self.size)
        if sent and sent != self.size:
            self.room.learn(self.key, sent)


def _static_size(service: Service) -> int:
    """Tell the bytes of a service's outputs, 0 if they differ from answer to answer."""
    outputs = service.metadata.outputs
    if not all(dim.is_fixed for output in outputs for dim in output.shape):
        return 0
    return sum(output.datatype.itemsize * prod(dim.low for dim in output.shape) for output in outputs)
