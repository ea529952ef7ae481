"""Whether a peer takes anything of what is sent to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from trio.abc import SendStream

__all__ = ["Standstill", "unsent_bytes"]


class Standstill:
    """Tells for how long a value has been the same, as far as it was looked at."""

    __slots__ = ("_since", "_value")

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """Look at the value: how long has it been what it is now?"""
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since


def unsent_bytes(stream: SendStream) -> int:
    """Count the bytes that a stream's socket holds because the peer has not taken them; 0 where that is not known.

    A socket takes more only when much of what it holds is gone, so that of a slow peer nothing else is seen for long.
    """
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    sock = getattr(stream, "socket", None)
    if sock is None or sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # A socket that is closed has the number -1.
        return 0
