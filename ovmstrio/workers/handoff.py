"""Connections on their way from the process that accepts them to the one that serves them.

::

    parent ──(a descriptor along with a message)──> ConnectionInbox ─> the front end's listener
"""

from __future__ import annotations

import math
import os
import socket
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import structlog
import trio

from ovmstrio.core.connection import UNKNOWN, socket_address
from ovmstrio.transport.accepting import QUIET_SECONDS
from ovmstrio.transport.direct_stream import DirectStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.isolation.worker_program import WorkRequest

__all__ = ["ConnectionInbox", "PassedStream", "noted"]

# ----------------------------------------------------------------------
# Connections on their way from the process that accepts them to the one that serves them
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


class PassedStream(DirectStream):
    """A connection that another process has accepted, and that is counted when it is closed.

    Args:
        stream: the connection.
        closed: is called once, when the connection is closed.
        peer_address: its other end.
    """

    def __init__(
        self, stream: trio.SocketStream, closed: Callable[[], None], peer_address: ClientAddress = UNKNOWN
    ) -> None:
        super().__init__(stream, peer_address)
        self._closed: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close the connection, and report it; as :meth:`DirectStream.close`."""
        super().close()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


class ConnectionInbox(trio.abc.Listener[PassedStream]):
    """Listens for connections that another process has accepted.

    Args:
        closed: is called for each connection that has been closed.
    """

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._quiet_until = float("-inf")
        # Unbounded: the other process gives what it has accepted, and accepts no more than there are descriptors.
        self._put, self._take = trio.open_memory_channel[PassedStream](math.inf)

    async def put(self, request: WorkRequest) -> None:
        """Take the connection that has come along with a message.

        The message holds the protocol, and the host and port of the client.  The client is unknown without them.

        Ownership: what has not been accepted is closed with the listener.

        Cancellation: nothing waits here.
        """
        _, *address = request.value
        if request.descriptor is not None:
            passed = socket.socket(fileno=request.descriptor)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(passed))
            peer_address = socket_address(passed.family, tuple(address))
            self._put.send_nowait(PassedStream(stream, self._closed, peer_address))
            return
        # This process had no room for another descriptor, and so the system has closed the connection.
        self._closed()
        now = trio.current_time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning("connections lost", reason="Too many open files (EMFILE)")

    async def accept(self) -> PassedStream:
        """Return the next connection.

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
            stream.close()
        self._take.close()


# ----------------------------------------------------------------------
# Sockets by which the processes of one server speak with each other, and which nobody else may hold
# ----------------------------------------------------------------------

_ENDS: Final[WeakSet[socket.socket]] = WeakSet()


def noted(end: socket.socket) -> socket.socket:
    """Have what code of users forks hold no copy of a socket: it may outlive this process, and keep its address."""
    _ENDS.add(end)
    return end


def _disown() -> None:
    """Close them in a process that has been forked."""
    for end in list(_ENDS):
        if end.fileno() >= 0:
            os.close(end.detach())


os.register_at_fork(after_in_child=_disown)
