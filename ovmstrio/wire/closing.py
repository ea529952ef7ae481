"""Ends of connections at which nothing is lost: neither the last answer nor a request that had come."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import Final

import trio

__all__ = ["LINGER_SECONDS", "close_gently", "has_unread", "transport_of"]

LINGER_SECONDS: Final = 2.0
"""How long a client may go on sending once it has been answered for the last time."""

_READ_BYTES: Final = 64 * 1024


def transport_of(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Give the stream below TLS, or the stream itself."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream


def has_unread(stream: trio.abc.Stream) -> bool:
    """Tell whether bytes of the peer, or its goodbye, have come that nobody has read; streams without a socket lie."""
    sock = getattr(transport_of(stream), "socket", None)
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


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
        await trio.aclose_forcefully(stream)
