"""Ends of connections at which nothing is lost: neither the last answer nor a request that had come."""

from __future__ import annotations

import fcntl
import select
import termios
from contextlib import suppress
from typing import Final

import trio

from ovmstrio.wire.direct_stream import DirectStream, transport_of

__all__ = ["LINGER_SECONDS", "close_gently", "close_now", "has_unread", "has_unread_bytes"]

LINGER_SECONDS: Final = 2.0
"""How long a client may go on sending once it has been answered for the last time."""

_READ_BYTES: Final = 64 * 1024


def has_unread(stream: trio.abc.Stream) -> bool:
    """Tell whether bytes of the peer, or its goodbye, have come that nobody has read; streams without a socket lie."""
    sock = getattr(transport_of(stream), "socket", None)
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def has_unread_bytes(stream: trio.abc.Stream) -> bool:
    """Return whether bytes of the peer have come that were not read, which a goodbye alone is not."""
    sock = getattr(transport_of(stream), "socket", None)
    if sock is None or sock.fileno() < 0:
        return False
    with suppress(OSError):
        return any(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))
    return False


async def close_now(stream: trio.abc.Stream) -> None:
    """Close a stream without a word to the peer.

    A plain socket is closed in one step: cancel scopes and checkpoints take longer, and thousands may close at once.

    Cancellation: the stream is closed in any case.
    """
    if isinstance(stream, DirectStream):
        stream.close()
    elif isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        await trio.aclose_forcefully(stream)


async def close_gently(stream: trio.abc.Stream, seconds: float = LINGER_SECONDS) -> None:
    """Say that nothing more will come, drop what the peer still sends, and close when it does, or after a time.

    A socket that is closed with bytes unread resets the connection, and throws away what its peer has not read.

    Cancellation: closes at once.
    """
    transport = transport_of(stream)
    try:
        with trio.move_on_after(seconds), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if isinstance(transport, trio.abc.HalfCloseableStream):
                await transport.send_eof()
                while await transport.receive_some(_READ_BYTES):
                    pass
    finally:
        await close_now(stream)
