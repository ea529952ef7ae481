"""Connections on their way from the process that accepts them to the one that serves them.

::

    parent ──(a byte and a descriptor, over a socket pair)──> ConnectionInbox ─> the front end's listener
           <──(the byte that says that the process can serve)──

The socket pair's end says to either that the other has ended.
"""

from __future__ import annotations

import array
import math
import socket
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DRAIN", "READY", "ConnectionInbox", "pass_connection"]

_CONNECTION: Final = b"c"
DRAIN: Final = b"d"
READY: Final = b"r"
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize


async def pass_connection(control: trio.socket.SocketType, descriptor: int) -> None:
    """Give a connection to the process at the other end; the caller still has its own descriptor of it.

    Raises:
        OSError: that process has ended.

    Cancellation: before it is given.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    await control.sendmsg([_CONNECTION], [rights])


class _PassedStream(trio.abc.HalfCloseableStream):
    """A connection whose end is told."""

    def __init__(self, stream: trio.SocketStream, closed: Callable[[], None]) -> None:
        self._stream = stream
        self._tell: Callable[[], None] | None = closed

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below."""
        return self._stream.socket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything."""
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what there is."""
        return await self._stream.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        tell, self._tell = self._tell, None
        try:
            await self._stream.aclose()
        finally:
            if tell is not None:
                tell()


class ConnectionInbox(trio.abc.Listener[trio.abc.HalfCloseableStream]):
    """Listens for connections that another process has accepted.

    Args:
        control: from that process.
        closed: is called for each connection that has ended.
    """

    def __init__(self, control: trio.socket.SocketType, closed: Callable[[], None]) -> None:
        self._control = control
        self._closed = closed
        # Unbounded: the other process gives what it has accepted, and accepts no more than there are descriptors.
        self._put, self._take = trio.open_memory_channel[trio.abc.HalfCloseableStream](math.inf)

    async def run(self) -> None:
        """Receive connections until the other process says that none will follow, or ends.

        Cancellation: at any checkpoint; what has been received and not accepted is closed with the listener.
        """
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        while True:
            try:
                data, rights, _, _ = await self._control.recvmsg(1, space)
            except ConnectionError:
                return
            if data in {b"", DRAIN}:
                return
            for _, _, descriptors in rights:
                found = array.array("i")
                found.frombytes(descriptors[: len(descriptors) - len(descriptors) % _DESCRIPTOR_BYTES])
                for descriptor in found:
                    self._put.send_nowait(self._stream(descriptor))

    def _stream(self, descriptor: int) -> trio.abc.HalfCloseableStream:
        accepted = trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor))
        return _PassedStream(trio.SocketStream(accepted), self._closed)

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
