"""A connection that has been read from, handed to hypercorn, with every wait bounded."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.wire.http.sending import send_bounded

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

__all__ = ["PrefixedStream"]

LINGER_SECONDS: Final = 2.0
"""How long a client may go on sending once it has been answered for the last time."""

CLOSE_SECONDS: Final = 1.0


class PrefixedStream:
    """A stream whose first bytes have been read already, with what hypercorn uses of one."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self._finished = False
        self._reading: trio.CancelScope | None = None
        self._read_until = math.inf

    @property
    def encrypted(self) -> bool:
        """Whether there is TLS between the client and this."""
        return isinstance(self._stream, trio.SSLStream)

    @property
    def transport(self) -> trio.SocketStream:
        """The stream below TLS."""
        return self._stream.transport_stream if isinstance(self._stream, trio.SSLStream) else self._stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Give the bytes that were read before, and then what comes; none once finished.

        Raises:
            trio.BrokenResourceError: the connection broke.

        Cancellation: at any time; no bytes are lost.
        """
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            await trio.lowlevel.checkpoint()
            return prefix
        with trio.CancelScope(deadline=self._read_until) as self._reading:
            data = bytes(await self._stream.receive_some(max_bytes))
            while data and self._finished:
                data = bytes(await self._stream.receive_some(max_bytes))
            return data
        return b""

    async def send_all(self, data: Buffer) -> None:
        """Send everything.

        Raises:
            trio.BrokenResourceError: the connection broke, or the client stopped reading.

        Cancellation: at any time; the connection is unusable then.
        """
        await send_bounded(self._stream, data)

    async def send_eof(self) -> None:
        """Close the sending side; TLS has no such thing.

        Raises:
            trio.BrokenResourceError: the connection broke.

        Cancellation: at once.
        """
        if isinstance(self._stream, trio.SocketStream):
            await self._stream.send_eof()

    async def finish(self) -> None:
        """Send nothing any more, and drop what still comes, for a while.

        Closing at once, with bytes unread, would tell the client that the connection broke, and it might never see
        the answer that says why.

        Cancellation: at once.
        """
        self._finished = True
        self._read_until = trio.current_time() + LINGER_SECONDS
        if self._reading is not None:
            self._reading.deadline = self._read_until
        with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            await self.send_eof()

    async def aclose(self) -> None:
        """Close the connection, even if the client does not take TLS's goodbye.

        Cancellation: closes it all the same.
        """
        with trio.move_on_after(CLOSE_SECONDS):
            await self._stream.aclose()
