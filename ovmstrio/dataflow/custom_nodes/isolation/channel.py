"""The way between the server and a worker process: a socket that carries descriptors of memory files."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import trio

from ovmstrio.dataflow.custom_nodes.isolation import memory_files
from ovmstrio.dataflow.custom_nodes.isolation.memory_files import Message

__all__ = ["Channel", "channel_pair"]

Ndarray = np.ndarray[Any, Any]

_MARK: Final = b"m"
_DESCRIPTOR: Final = "i"
_DESCRIPTOR_BYTES: Final = array.array(_DESCRIPTOR).itemsize


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends; messages have borders, so that none is ever cut."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end.

    Args:
        end: a socket of :func:`channel_pair`, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)
        self._sending = trio.Lock()

    async def send(self, message: Message, arrays: Mapping[str, Ndarray]) -> None:
        """Send a message with arrays, which are copied.

        Raises:
            BrokenResourceError: the other end is gone.
            ClosedResourceError: this end is closed.
            OSError: there is no memory left.

        Ownership: nothing afterwards.

        Cancellation: at once, except while the arrays are copied; a message is then sent as a whole or not at all.
        """
        file = await trio.to_thread.run_sync(memory_files.write, message, arrays)
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(_DESCRIPTOR, [file]))]
            async with self._sending:
                await self._socket.sendmsg([_MARK], ancillary)
        except OSError as error:
            raise trio.BrokenResourceError("the other end is gone") from error
        finally:
            os.close(file)

    async def receive(self) -> tuple[Message, dict[str, Ndarray]] | None:
        """Wait for a message; None once the other end is gone.

        Raises:
            ValueError: what came is no message.

        Ownership: the arrays, which nobody else has.

        Cancellation: at once; nothing is lost.
        """
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        try:
            mark, ancillary, _, _ = await self._socket.recvmsg(len(_MARK), space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        if not mark:
            return None
        files = array.array(_DESCRIPTOR)
        for _, _, data in ancillary:
            files.frombytes(data)
        (file,) = files
        return memory_files.read(file)

    def finish(self) -> None:
        """Tell the other end that nothing more will come; what it still sends can be received."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
