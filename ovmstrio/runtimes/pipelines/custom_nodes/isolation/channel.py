"""The way between the server and a worker process: a socket that carries memory files."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import trio

from ovmstrio.runtimes.pipelines.custom_nodes.isolation import memory_files
from ovmstrio.runtimes.pipelines.custom_nodes.isolation.memory_files import Message
from ovmstrio.work.processes import PacketSocket

__all__ = ["Channel"]

Ndarray = np.ndarray[Any, Any]

_MARK: Final = b"m"


class Channel:
    """One end.

    Args:
        end: a socket of a pair for packets, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._packets = PacketSocket(end)
        self._sending = trio.Lock()

    async def send(self, message: Message, arrays: Mapping[str, Ndarray]) -> None:
        """Send a message with arrays, which are copied.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.
            OSError: there is no memory left.

        Ownership: nothing afterwards.

        Cancellation: at once, except while the arrays are copied; a message is then sent as a whole or not at all.
        """
        file = await trio.to_thread.run_sync(memory_files.write, message, arrays)
        try:
            async with self._sending:
                await self._packets.send(_MARK, file)
        finally:
            os.close(file)

    async def receive(self) -> tuple[Message, dict[str, Ndarray]] | None:
        """Wait for a message; None once the other end is gone.

        Raises:
            ValueError: what came is no message.

        Ownership: the arrays, which nobody else has.

        Cancellation: at once; nothing is lost.
        """
        received = await self._packets.receive(len(_MARK))
        if received is None:
            return None
        _, file = received
        if file is None:
            raise ValueError("a message without a file")
        return memory_files.read(file)

    def finish(self) -> None:
        """Tell the other end that nothing more will come; what it still sends can be received."""
        self._packets.finish()

    def end(self) -> None:
        """Take no more than has been sent by now, because the other process has ended."""
        self._packets.end()

    def close(self) -> None:
        """Close this end."""
        self._packets.close()
