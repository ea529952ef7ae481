"""Messages between the server and a worker process: small ones in a packet, large ones as a file in memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import trio

from ovmstrio.work.processes.packet_socket import PacketSocket
from ovmstrio.work.processes.value_codec import Encoded, decode

__all__ = ["MOST_INLINE", "NO_MESSAGE", "Message", "MessageChannel", "make_file", "map_file"]

MOST_INLINE: Final = 64 * 1024
"""How many bytes a message has at most that goes in a packet itself."""

NO_MESSAGE: Final = (ValueError, LookupError, TypeError, OSError, RecursionError)
"""What reading a message raises if a process whose memory is broken has written it."""

_INLINE: Final = b"i"
_FILE: Final = b"f"


class Message(NamedTuple):
    """What has come: a value, and the descriptor that came along, which is its receiver's to close."""

    value: Any
    descriptor: int | None = None


class MessageChannel:
    """One end.

    Args:
        end: a socket of a pair for packets, which belongs to the channel from now on.

    Attributes:
        packets: what lies below, to be finished, ended or closed.
    """

    def __init__(self, end: socket.socket) -> None:
        self.packets = PacketSocket(end)
        self._sending = trio.Lock()

    async def send(self, value: Any, descriptor: int | None = None) -> None:
        """Send a value, which is copied once, and a copy of a descriptor with it.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.
            TypeError: the value is not of what can be sent; nothing has been.
            OSError: there is no memory left.

        Ownership: nothing afterwards.

        Cancellation: at once, except while large arrays are copied; a message is then sent as a whole or not at all.
        """
        message = Encoded(value)
        files = [] if descriptor is None else [descriptor]
        if message.size <= MOST_INLINE:
            packet = bytearray(len(_INLINE) + message.size)
            packet[: len(_INLINE)] = _INLINE
            message.write(memoryview(packet)[len(_INLINE) :])
            await self._send(packet, files)
            return
        file = await trio.to_thread.run_sync(_as_file, message)
        try:
            await self._send(_FILE, [file, *files])
        finally:
            os.close(file)

    async def _send(self, packet: bytes | bytearray, files: list[int]) -> None:
        # Whoever need not wait makes no pass of the loop for it.
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self.packets.send(packet, files)
        finally:
            self._sending.release()

    async def receive(self) -> Message | None:
        """Wait for a message; None once the other end is gone.

        Raises:
            ValueError, LookupError, TypeError, OSError, RecursionError: what came is no message.

        Ownership: the value, with arrays that nobody else has, and the descriptor.

        Cancellation: at once; nothing is lost.
        """
        received = await self.packets.receive(len(_INLINE) + MOST_INLINE)
        return None if received is None else _read(*received)


def _as_file(message: Encoded) -> int:
    return make_file("message", message.size, lambda mapped: message.write(memoryview(mapped)))


def _read(packet: bytes, files: list[int]) -> Message:
    """Read a message of a packet and its files; if it is none, they are closed.

    Raises:
        ValueError, LookupError, TypeError, OSError, RecursionError: it is none.
    """
    try:
        return Message(decode(_memory(packet, files)), *files)
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _memory(packet: bytes, files: list[int]) -> memoryview:
    if packet == _FILE:
        return memoryview(map_file(files.pop(0)))
    if packet.startswith(_INLINE):
        return memoryview(bytearray(memoryview(packet)[len(_INLINE) :]))
    raise ValueError(f"a packet that begins with {packet[:8]!r}")


def make_file(name: str, size: int, fill: Callable[[mmap.mmap], object]) -> int:
    """Make a file of ``size`` bytes, at least one, that ``fill`` writes; give its descriptor, which the caller closes.

    Raises:
        OSError: there is no memory, or no descriptor, left.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fill(mmap.mmap(file, size))
    except BaseException:
        os.close(file)
        raise
    return file


def map_file(file: int) -> mmap.mmap:
    """Map a file that another process has made, and close its descriptor.

    Raises:
        OSError: it is no such file, or there is no memory left.
        ValueError: it is empty.
    """
    try:
        # Whoever has written it may go mad, and must not take memory away that is in use.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
