"""A connection of a worker process, of which nobody goes on with what was read."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from ovmstrio.core.peers import UNKNOWN
from ovmstrio.server.workers.journal import NO_SLOT, State
from ovmstrio.wire.direct_stream import DirectStream

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from ovmstrio.core.peers import ClientAddress
    from ovmstrio.server.workers.journal import Journal

__all__ = ["PassedStream"]


class PassedStream(DirectStream):
    """A connection whose end is told, and in as few steps as one that this process has accepted.

    Args:
        stream: the connection.
        journal: of this process; says of the connection whether it was read from.
        slot: the connection's; ``NO_SLOT`` if the parent has no descriptor of it.
        closed: is called once it has ended.
        peer_address: its other end.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        journal: Journal,
        slot: int,
        closed: Callable[[], None],
        *,
        peer_address: ClientAddress = UNKNOWN,
    ) -> None:
        super().__init__(stream, peer_address)
        self._journal = journal
        self._slot = slot
        self._is_unread = slot != NO_SLOT
        self._tell: Callable[[], None] | None = closed

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what there is; as :meth:`DirectStream.receive_some`."""
        if self._is_unread:
            self._note_read()
        return await super().receive_some(max_bytes)

    async def receive_into(self, target: memoryview) -> int:
        """Receive into a buffer; as :meth:`DirectStream.receive_into`."""
        if self._is_unread:
            self._note_read()
        return await super().receive_into(target)

    def _note_read(self) -> None:
        self._is_unread = False
        self._journal.set_state(self._slot, State.UNKNOWN)

    async def aclose(self) -> None:
        """Close the connection, though the parent may have it, too."""
        tell, self._tell = self._tell, None
        is_kept = tell is not None and self._slot != NO_SLOT
        # From here on the slot may be another connection's.
        self._is_unread = False
        try:
            if is_kept:
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
            await super().aclose()
        finally:
            if is_kept:
                self._journal.end(self._slot)
            if tell is not None:
                tell()
