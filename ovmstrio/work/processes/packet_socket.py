"""A socket between two processes of this machine, for packets that may have files with them."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from ovmstrio.work.messages.message_packets import MOST_FILES

__all__ = ["PacketSocket", "packet_pair"]

_DESCRIPTOR: Final = "i"
_DESCRIPTOR_BYTES: Final = array.array(_DESCRIPTOR).itemsize
_FLAGS: Final = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_MOST_AT_ONCE: Final = 16
"""How many packets are received before other tasks have their turn."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MOST_FILES * _DESCRIPTOR_BYTES)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends; packets have borders, so that none is ever cut."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class PacketSocket:
    """One end.

    Args:
        end: a socket of :func:`packet_pair`, which belongs to this object from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._socket = trio.socket.from_stdlib_socket(end)
        self._at_once = 0

    async def send(self, packet: bytes | bytearray, files: Sequence[int] = ()) -> None:
        """Send a packet of at least one byte, and copies of descriptors with it; one task at a time may send.

        Raises:
            BrokenResourceError: the other end is gone, or this one is closed.

        Ownership: nothing; the descriptors remain the caller's to close.

        Cancellation: at once; the packet is sent as a whole or not at all.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(_DESCRIPTOR, files))] if files else []
        try:
            await self._socket.sendmsg([packet], rights)
        except (OSError, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError("the other end is gone") from error

    def send_now(self, packet: bytes) -> bool:
        """Send a packet if there is room for it, from whichever thread, and say whether there was.

        One for an end that is gone counts as sent.
        """
        try:
            self._end.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def try_send(self, packet: bytes) -> bool:
        """Send a packet if there is room for it, and say whether there was; not while another task sends.

        Raises:
            BrokenResourceError: the other end is gone, or this one is closed.
        """
        try:
            self._end.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise trio.BrokenResourceError("the other end is gone") from error
        return True

    async def receive(self, most: int) -> tuple[bytes, list[int]] | None:
        """Wait for a packet of up to ``most`` bytes, and the files that came with it; None once the other end is gone.

        Not a checkpoint where a packet is there, but for one in so many.

        Ownership: the descriptors, which the caller closes.

        Cancellation: while waiting; nothing is lost.
        """
        self._at_once += 1
        if self._at_once > _MOST_AT_ONCE:
            self._at_once = 0
            await trio.lowlevel.checkpoint()
        try:
            while True:
                with suppress(BlockingIOError):
                    packet, ancillary, _, _ = self._end.recvmsg(most, _ANCILLARY_BYTES, _FLAGS)
                    break
                self._at_once = 0
                await self._wait_readable()
        except (OSError, trio.ClosedResourceError):
            return None
        if not packet:
            return None
        files = array.array(_DESCRIPTOR)
        for _, _, data in ancillary:
            files.frombytes(data)
        return packet, files.tolist()

    async def _wait_readable(self) -> None:
        number = self._end.fileno()
        if number < 0:
            raise trio.ClosedResourceError("this end is closed")
        await trio.lowlevel.wait_readable(number)

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
