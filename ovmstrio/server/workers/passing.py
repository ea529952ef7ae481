"""Connections on their way from the process that accepts them to the one that serves them.

::

    parent ──(a descriptor along with a message)──> ConnectionInbox ─> the front end's listener
"""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.core.peers import socket_address
from ovmstrio.server.workers.journal import NO_SLOT
from ovmstrio.server.workers.kept_stream import KeptStream
from ovmstrio.server.workers.passed_stream import PassedStream
from ovmstrio.wire.accepting import QUIET_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.server.workers.journal import Journal
    from ovmstrio.work.processes import WorkRequest

__all__ = ["ConnectionInbox"]

log = structlog.get_logger(__name__)


class ConnectionInbox(trio.abc.Listener[trio.abc.HalfCloseableStream]):
    """Listens for connections that another process has accepted.

    Args:
        closed: is called for each connection that has ended.
        journal: where it is written what becomes of them.
        keeps: whether requests are kept for another process, which those of HTTP/1.1 alone can be.
    """

    def __init__(self, closed: Callable[[], None], journal: Journal, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._closed = closed
        self._journal = journal
        self._quiet_until = float("-inf")
        # Unbounded: the other process gives what it has accepted, and accepts no more than there are descriptors.
        self._put, self._take = trio.open_memory_channel[trio.abc.HalfCloseableStream](math.inf)

    async def put(self, request: WorkRequest) -> None:
        """Take the connection that has come along with a message.

        The message holds the protocol, the host and port of the client, and the slot of the connection in the journal.
        The client is unknown without a host and port.

        Ownership: what has not been accepted is closed with the listener.

        Cancellation: nothing waits here.
        """
        _, *address, slot = request.value
        if request.descriptor is not None:
            self._put.send_nowait(self._stream(socket.socket(fileno=request.descriptor), tuple(address), slot))
            return
        # There was no room for another descriptor here; whoever gave the connection closes it now.
        if slot != NO_SLOT:
            self._journal.end(slot)
        self._closed()
        now = trio.current_time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning("connections lost", reason="Too many open files (EMFILE)")

    def _stream(self, passed: socket.socket, name: tuple[object, ...], slot: int) -> trio.abc.HalfCloseableStream:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(passed))
        address = socket_address(passed.family, name)
        if slot == NO_SLOT or not self._keeps:
            return PassedStream(stream, self._journal, slot, self._closed, peer_address=address)
        return KeptStream(stream, passed, self._journal, slot, self._closed, peer_address=address)

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Give the next connection.

        Raises:
            trio.ClosedResourceError: the listener is closed.

        Cancellation: while there is none.
        """
        return await self._take.receive()

    async def aclose(self) -> None:
        """Close the listener, and the connections that nobody has taken.

        Cancellation: nothing waits here.
        """
        while True:
            try:
                stream = self._take.receive_nowait()
            except (trio.WouldBlock, trio.ClosedResourceError, trio.EndOfChannel):
                break
            await trio.aclose_forcefully(stream)
        self._take.close()
