"""What the kernel has counted of a connection, whatever became of the process that used it."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import trio

__all__ = ["UNCOUNTED", "read_bytes", "written_bytes"]

UNCOUNTED: Final = -1
"""The kernel does not count, or the connection is no TCP."""
_TAKEN_AT: Final = 120
"""Where the kernel's description of a TCP connection has the count of bytes that the peer has acknowledged."""
_COME_AT: Final = 128
"""Where it has the count of bytes that have come."""
_INFO_BYTES: Final = 256


def read_bytes(connection: trio.socket.SocketType) -> int:
    """Count the bytes that have been read from a connection; :data:`UNCOUNTED` if that is not known."""
    come = _count(connection, _COME_AT)
    if come <= 0:
        return UNCOUNTED
    try:
        (waiting,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))
    except OSError:
        return UNCOUNTED
    # The end of what a client sends counts as a byte.
    return int(come - waiting - _has_ended(connection))


def written_bytes(connection: trio.socket.SocketType) -> int:
    """Count the bytes that have been written to a connection, from some beginning that stays the same.

    Gives :data:`UNCOUNTED` if that is not known.
    """
    taken = _count(connection, _TAKEN_AT)
    while taken != UNCOUNTED:
        try:
            (held,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return UNCOUNTED
        before, taken = taken, _count(connection, _TAKEN_AT)
        if before == taken:
            return int(taken + held)
    return UNCOUNTED


def _count(connection: trio.socket.SocketType, place: int) -> int:
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return UNCOUNTED
    try:
        description = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (count,) = struct.unpack_from("Q", description, place)
    except (OSError, struct.error):
        return UNCOUNTED
    return int(count)


def _has_ended(connection: trio.socket.SocketType) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
