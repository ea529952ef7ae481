"""A socket between two processes of this machine, for packets that may have a file with them."""

from __future__ import annotations

import array
import socket
from contextlib import suppress
from typing import Final

import trio

__all__ = ["PacketSocket", "packet_pair"]

_DESCRIPTOR: Final = "i"
_DESCRIPTOR_BYTES: Final = array.array(_DESCRIPTOR).itemsize


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends; packets have borders, so that none is ever cut."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class PacketSocket:
    """One end.

    Args:
        end: a socket of :func:`packet_pair`, which belongs to this object from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)

    async def send(self, packet: bytes | bytearray, file: int | None = None) -> None:
        """Send a packet of at least one byte, and a copy of a descriptor with it; one task at a time may send.

        Raises:
            BrokenResourceError: the other end is gone, or this one is closed.

        Ownership: nothing; the descriptor remains the caller's to close.

        Cancellation: at once; the packet is sent as a whole or not at all.
        """
        files = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(_DESCRIPTOR, [file]))]
        try:
            await self._socket.sendmsg([packet], files)
        except (OSError, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError("the other end is gone") from error

    async def receive(self, most: int) -> tuple[bytes, int | None] | None:
        """Wait for a packet of up to ``most`` bytes, and the file that came with it; None once the other end is gone.

        Ownership: the descriptor, which the caller closes.

        Cancellation: at once; nothing is lost.
        """
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        try:
            packet, ancillary, _, _ = await self._socket.recvmsg(most, space, socket.MSG_CMSG_CLOEXEC)
        except (OSError, trio.ClosedResourceError):
            return None
        if not packet:
            return None
        files = array.array(_DESCRIPTOR)
        for _, _, data in ancillary:
            files.frombytes(data)
        return packet, files[0] if files else None

    def finish(self) -> None:
        """Tell the other end that nothing more will come; what it still sends can be received."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Take no more than has been sent by now, because the other process has ended.

        A process that it has left behind may have a copy of its end, so that the end of one is not that of the other.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
