"""Listeners at sockets, which take several connections in a turn of the event loop."""

from __future__ import annotations

import errno
import socket
from collections import deque
from typing import Final

import trio

from ovmstrio.core.peers import socket_address
from ovmstrio.wire.direct_stream import DirectStream

__all__ = ["InheritedListener", "PlainListener"]

_MORE_AT_ONCE: Final = 7
"""To begin with a connection takes longer than a call: no more of them than others can wait for."""

_FAILED_CONNECTION: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EPROTO,
        errno.ETIMEDOUT,
    }
)
"""Errors of a connection that fails before it is accepted (``accept(2)``); the listener goes on."""


class PlainListener(trio.abc.Listener[DirectStream]):
    """Accepts connections at a socket, a few of those that wait in each turn of the event loop.

    trio's takes one, and turns of a busy server take milliseconds: of many clients that come together the last would
    wait for as many of them.  It also drops the address of the client, which a connection that is reset has no more.

    Args:
        transport_listener: trio's; closed with this one.

    Attributes:
        socket: trio's.
    """

    def __init__(self, transport_listener: trio.SocketListener) -> None:
        self._listener = transport_listener
        self.socket = transport_listener.socket
        own = self.socket
        # Another object for the same descriptor, as trio's gives the turn away with each connection.
        self._same = socket.socket(own.family, own.type, own.proto, fileno=own.fileno())
        self._taken: deque[DirectStream] = deque()

    async def accept(self) -> DirectStream:
        """Accept one connection, which keeps the address of its client.

        Raises:
            OSError: the system has no room for another one, or the socket is broken.
            trio.ClosedResourceError: this is closed.

        Cancellation: at once.  Not a checkpoint where a connection was taken together with the last one.
        """
        while not self._taken:
            try:
                sock, name = await self.socket.accept()
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise trio.ClosedResourceError("the listener is closed") from None
                if error.errno not in _FAILED_CONNECTION:
                    raise
            else:
                self._taken.append(_stream(sock, name))
                self._take_more()
        return self._taken.popleft()

    def _take_more(self) -> None:
        for _ in range(_MORE_AT_ONCE):
            try:
                sock, name = self._same.accept()
            except OSError:
                # None waits; or it is told of what is wrong when one is waited for.
                return
            self._taken.append(_stream(trio.socket.from_stdlib_socket(sock), name))

    async def aclose(self) -> None:
        """Close the socket, and the connections that nobody has asked for."""
        self._same.detach()
        while self._taken:
            self._taken.popleft().socket.close()
        await self._listener.aclose()


def _stream(sock: trio.socket.SocketType, name: object) -> DirectStream:
    return DirectStream(trio.SocketStream(sock), socket_address(sock.family, name))


class InheritedListener(PlainListener):
    """A listener at a socket that others have, too: it goes on to take connections when this process does not."""
