"""Listeners at sockets, which take several connections in a turn of the event loop."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

import trio

__all__ = ["InheritedListener", "PlainListener"]

_MORE_AT_ONCE: Final = 7
"""To begin with a connection takes longer than a call: no more of them than others can wait for."""


class PlainListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts connections at a socket, a few of those that wait in each turn of the event loop.

    trio's takes one, and turns of a busy server take milliseconds: of many clients that come together the last would
    wait for as many of them.

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
        self._taken: deque[trio.SocketStream] = deque()

    async def accept(self) -> trio.SocketStream:
        """Accept one connection.

        Raises:
            OSError: the system has no room for another one, or the socket is broken.
            trio.ClosedResourceError: this is closed.

        Cancellation: at once.  Not a checkpoint where a connection was taken together with the last one.
        """
        if self._taken:
            return self._taken.popleft()
        stream = await self._listener.accept()
        self._take_more()
        return stream

    def _take_more(self) -> None:
        for _ in range(_MORE_AT_ONCE):
            try:
                sock, _name = self._same.accept()
            except OSError:
                # None waits; or it is told of what is wrong when one is waited for.
                return
            self._taken.append(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))

    async def aclose(self) -> None:
        """Close the socket, and the connections that nobody has asked for."""
        self._same.detach()
        while self._taken:
            self._taken.popleft().socket.close()
        await self._listener.aclose()


class InheritedListener(PlainListener):
    """A listener at a socket that others have, too: it goes on to take connections when this process does not."""
