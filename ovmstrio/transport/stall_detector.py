"""Detection of peers that do not read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from trio.abc import SendStream


class ProgressTimer:
    """Timer of how long a sampled value has been unchanged."""

    __slots__ = ("_since", "_value")

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """Sample the value and return for how many seconds it has been unchanged."""
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since


def unsent_bytes(stream: SendStream) -> int:
    """Return the bytes in the socket's send buffer that the peer has not acknowledged; 0 if unknown.

    A socket accepts more only after much of its buffer was acknowledged, so this is the only early sign of a slow
    reader.
    """
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    sock = getattr(stream, "socket", None)
    if sock is None or sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # A closed socket has the descriptor -1.
        return 0
