"""Messages between the server and a worker process, on trio: small ones in a packet, large ones in shared memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import trio

from ovmstrio.work.messages.message_packets import MOST_PACKET, Message, MessagePackets
from ovmstrio.work.processes.packet_socket import PacketSocket

__all__ = ["MessageChannel"]

_QUICKLY_COPIED: Final = 256 * 1024
"""How many bytes are copied on the event loop; a hop to a thread costs as much."""


class MessageChannel:
    """One end.

    Args:
        end: a socket of a pair for packets, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = PacketSocket(end)
        self._packets = MessagePackets(self._socket.send_now)
        self._sending = trio.Lock()

    async def send(self, value: Any, descriptor: int | None = None) -> None:
        """Send a value, which is copied once, and a copy of a descriptor with it.

        Large arrays that lie in memory that came from another process are not copied.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.
            TypeError: the value is not of what can be sent; nothing has been.
            OSError: there is no memory left.

        Ownership: nothing afterwards.

        Cancellation: at once, except while large arrays are copied; a message is then sent as a whole or not at all.
        """
        message = self._packets.prepare(value, descriptor)
        try:
            if message.size <= _QUICKLY_COPIED:
                packet = message.write()
            else:
                packet = await trio.to_thread.run_sync(message.write)
            await self._send(packet, message.files)
        except BaseException:
            self._packets.withdrawn(message)
            raise
        self._packets.sent(message)

    async def send_packet(self, packet: bytes) -> None:
        """Send what :func:`swift_packet` has made.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.

        Cancellation: while waiting for room; it is sent as a whole or not at all.
        """
        if not self.send_packet_now(packet):
            await self._send(packet)

    def send_packet_now(self, packet: bytes) -> bool:
        """Send such a packet if there is room for it, and nobody else sends; says whether it was sent.

        Raises:
            BrokenResourceError: the other end is gone, or this end is closed.
        """
        return not (self._sending.locked() or self._packets.has_backlog) and self._socket.try_send(packet)

    def send_soon(self, value: Any) -> None:
        """Send a small value if there is room for it, and drop it if there is none.

        Raises:
            TypeError: the value is not of what can be sent.
        """
        message = self._packets.prepare(value)
        if message.region is None:
            self._socket.send_now(bytes(message.write()))
        else:
            self._packets.withdrawn(message)

    def send_later(self, value: Any) -> None:
        """Send a small value, at once if there is room for it, and before the next one if there is none.

        Raises:
            TypeError, ValueError: the value is not of what can be sent, or not small.
        """
        message = self._packets.prepare(value)
        if message.region is not None:
            self._packets.withdrawn(message)
            raise ValueError("only small values can be sent later")
        self._packets.tell(bytes(message.write()))

    async def _send(self, packet: bytes | bytearray, files: Sequence[int] = ()) -> None:
        # Whoever need not wait makes no pass of the loop for it.
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            for late in self._packets.backlog():
                await self._socket.send(late)
            await self._socket.send(packet, files)
        finally:
            self._sending.release()

    async def receive(self) -> Message | None:
        """Wait for a message; None once the other end is gone.

        Raises:
            ValueError, LookupError, TypeError, OSError, RecursionError: what came is no message.

        Ownership: the value, with arrays that nobody else has, and the descriptor.

        Cancellation: at once; nothing is lost.
        """
        while (received := await self._socket.receive(MOST_PACKET)) is not None:
            message = self._packets.read(*received)
            if message is not None:
                return message
        return None

    def finish(self) -> None:
        """Tell the other end that nothing more will come; what it still sends can be received."""
        self._socket.finish()

    def end(self) -> None:
        """Take no more than has been sent by now; see :meth:`PacketSocket.end`."""
        self._socket.end()

    def close(self) -> None:
        """Close this end; memory goes when nobody looks at it any more."""
        self._socket.close()
        self._packets.close()
