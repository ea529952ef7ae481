"""The way between the server and a worker process: a socket for what is small, memory files for what is large."""

from __future__ import annotations

import mmap
import os
import socket
from typing import Any, Final

import trio

from ovmstrio.runtimes.ops.executor.processes.codec import Encoded, decode
from ovmstrio.work.processes import PacketSocket, make_file, map_file

__all__ = ["MOST_INLINE", "ProcessChannel"]

MOST_INLINE: Final = 64 * 1024
"""How many bytes a message has at most that goes through the socket itself."""

_INLINE: Final = b"i"
_FILE: Final = b"f"


class ProcessChannel:
    """One end.

    Args:
        end: a socket of a pair for packets, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._packets = PacketSocket(end)

    async def send(self, message: Encoded) -> None:
        """Send a message, which is copied.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.
            OSError: there is no memory left.

        Ownership: nothing afterwards.

        Cancellation: at once, except while large arrays are copied; a message is then sent as a whole or not at all.
        """
        if message.size <= MOST_INLINE:
            packet = bytearray(len(_INLINE) + message.size)
            packet[: len(_INLINE)] = _INLINE
            message.write(memoryview(packet)[len(_INLINE) :])
            await self._packets.send(packet)
            return
        file = await trio.to_thread.run_sync(_as_file, message)
        try:
            await self._packets.send(_FILE, file)
        finally:
            os.close(file)

    async def receive(self) -> Any:
        """Wait for a message and give its value; None once the other end is gone.

        Raises:
            ValueError, LookupError, TypeError: what came is no message.

        Ownership: the value, with arrays that nobody else has.

        Cancellation: at once; nothing is lost.
        """
        received = await self._packets.receive(len(_INLINE) + MOST_INLINE)
        if received is None:
            return None
        packet, file = received
        if file is not None:
            return decode(memoryview(map_file(file)))
        return decode(memoryview(bytearray(packet[len(_INLINE) :])))

    def finish(self) -> None:
        """Tell the other end that nothing more will come; what it still sends can be received."""
        self._packets.finish()

    def end(self) -> None:
        """Take no more than has been sent by now, because the other process has ended."""
        self._packets.end()

    def close(self) -> None:
        """Close this end."""
        self._packets.close()


def _as_file(message: Encoded) -> int:
    def fill(mapped: mmap.mmap) -> None:
        with mapped, memoryview(mapped) as view:
            message.write(view)

    return make_file("ops-sample", message.size, fill)
