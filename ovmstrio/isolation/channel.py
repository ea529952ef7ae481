"""Message channel between two processes: packets over a socket pair, large values in shared memory.

::

    i | value                                           small message
    s | length of JSON | JSON | bytes                   small message on the packed fast path, see PackedMessage
    f | number, region, size | ...                      large message in a region of the sender
    r | number                                          memory of that message released
    d | region                                          region dropped by the sender

Descriptors of an ``f`` packet: the region's own if the peer does not have it yet, then those of files that the
message's arrays refer to, then the one that the sender passes on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import trio

from ovmstrio.isolation.messages import (
    ANCILLARY_BYTES,
    MAX_PACKET_BYTES,
    Message,
    MessagePackets,
    decode_descriptors,
    encode_descriptors,
)
from ovmstrio.isolation.side_messages import RecordForwarder

# -- Socket ------------------------------------------------------------------------------------------------------------

_FLAGS: Final = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_PACKETS_PER_CHECKPOINT: Final = 16
"""Packets received between checkpoints."""


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Create a pair of SEQPACKET sockets, which preserve packet boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class PacketSocket:
    """One end of a socket pair for packets with descriptors; takes over the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._socket = trio.socket.from_stdlib_socket(end)
        self._packets_since_checkpoint = 0

    async def send(self, packet: bytes | bytearray, files: Sequence[int] = ()) -> None:
        """Send a non-empty packet with copies of descriptors, completely or not at all; one task at a time.

        Raises:
            BrokenResourceError: the peer has exited, or this end is closed.
        """
        try:
            await self._socket.sendmsg([packet], encode_descriptors(files))
        except (OSError, trio.ClosedResourceError) as error:
            raise trio.BrokenResourceError("the peer has closed the channel") from error

    def send_now(self, packet: bytes) -> bool:
        """Send a packet without blocking and return whether it was sent; thread-safe. True if the peer has exited."""
        try:
            return self.try_send(packet)
        except trio.BrokenResourceError:
            return True

    def try_send(self, packet: bytes) -> bool:
        """Like :meth:`send_now`, but raise ``BrokenResourceError`` if the peer has exited."""
        try:
            self._end.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise trio.BrokenResourceError("the peer has closed the channel") from error
        return True

    async def receive(
        self, max_bytes: int, before_checkpoint: Callable[[], None] | None = None
    ) -> tuple[bytes, list[int]] | None:
        """Wait for a packet of at most ``max_bytes``; return it with its descriptors, or None when the peer has closed.

        The caller closes the descriptors. A checkpoint only if no packet is waiting, and after every 16 packets;
        ``before_checkpoint`` is called before it.
        """
        self._packets_since_checkpoint += 1
        if self._packets_since_checkpoint > _PACKETS_PER_CHECKPOINT:
            self._packets_since_checkpoint = 0
            if before_checkpoint is not None:
                before_checkpoint()
            await trio.lowlevel.checkpoint()
        try:
            while True:
                try:
                    packet, ancillary, _, _ = self._end.recvmsg(max_bytes, ANCILLARY_BYTES, _FLAGS)
                    break
                except BlockingIOError:
                    pass
                self._packets_since_checkpoint = 0
                if (number := self._end.fileno()) < 0:
                    return None
                if before_checkpoint is not None:
                    before_checkpoint()
                await trio.lowlevel.wait_readable(number)
        except (OSError, trio.ClosedResourceError):
            return None
        if not packet:
            return None
        return packet, decode_descriptors(ancillary) if ancillary else []

    def finish(self) -> None:
        """Shut down sending; the peer's packets can still be received."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Stop receiving after the packets sent so far, because the peer process has exited.

        Needed because a child of the peer may have inherited its end, so that no EOF arrives.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# -- Channel -----------------------------------------------------------------------------------------------------------

_MAX_INLINE_COPY_BYTES: Final = 256 * 1024
"""Maximum size of messages copied on the event loop; a thread hop costs as much."""


class MessageChannel:
    """Message channel on trio; takes over the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = PacketSocket(end)
        self._packets = MessagePackets(self._socket.send_now)
        self._send_lock = trio.Lock()

    async def send(self, value: Any, descriptor: int | None = None) -> None:
        """Send a value with an optional descriptor (copied), completely or not at all.

        Arrays that lie in memory of another process are not copied.

        Raises:
            BrokenResourceError: the peer has exited, or this end is closed.
            TypeError: the value cannot be sent; nothing was sent.
            OSError: out of memory.
        """
        message = self._packets.prepare(value, descriptor)
        try:
            if message.size <= _MAX_INLINE_COPY_BYTES:
                packet = message.write()
            else:
                packet = await trio.to_thread.run_sync(message.write)
            await self._send(packet, message.files)
        except BaseException:
            self._packets.withdraw(message)
            raise
        self._packets.sent(message)

    async def send_packet(self, packet: bytes) -> None:
        """Send a packet of :func:`encode_packed`; raises ``BrokenResourceError`` if the peer has exited."""
        if not self.try_send_packet(packet):
            await self._send(packet)

    def try_send_packet(self, packet: bytes) -> bool:
        """Like :meth:`send_packet`, without blocking; return whether the packet was sent."""
        return not (self._send_lock.locked() or self._packets.has_backlog) and self._socket.try_send(packet)

    def send_or_drop(self, value: Any) -> None:
        """Send a small value without blocking, or drop it. Raises ``TypeError`` if the value cannot be sent."""
        message = self._packets.prepare(value)
        if message.region is None:
            self._socket.send_now(bytes(message.write()))
        else:
            self._packets.withdraw(message)

    def send_or_queue(self, value: Any) -> None:
        """Send a small value now, or before the next message if the socket is full; raises ``ValueError`` if large."""
        message = self._packets.prepare(value)
        if message.region is not None:
            self._packets.withdraw(message)
            raise ValueError("only small values can be sent later")
        self._packets.send_or_queue(bytes(message.write()))

    def log_forwarder(self) -> RecordForwarder:
        """Create a handler that sends log records to the peer."""
        return RecordForwarder(self._socket.send_now)

    async def _send(self, packet: bytes | bytearray, files: Sequence[int] = ()) -> None:
        # Without contention there is no checkpoint.
        try:
            self._send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            for late in self._packets.backlog():
                await self._socket.send(late)
            await self._socket.send(packet, files)
        finally:
            self._send_lock.release()

    async def receive(self, before_checkpoint: Callable[[], None] | None = None) -> Message | None:
        """Wait for a message; None when the peer has closed. Raises ``MALFORMED_MESSAGE_ERRORS`` if malformed.

        ``before_checkpoint`` is called when no message is waiting, and after at most 16 messages.
        """
        while (received := await self._socket.receive(MAX_PACKET_BYTES, before_checkpoint)) is not None:
            message = self._packets.read(*received)
            if message is not None:
                return message
        return None

    def finish(self) -> None:
        """Shut down sending; the peer's messages can still be received."""
        self._socket.finish()

    def end(self) -> None:
        """Stop receiving after the messages sent so far; see :meth:`PacketSocket.end`."""
        self._socket.end()

    def close(self) -> None:
        """Close this end; memory is released with its last view."""
        self._socket.close()
        self._packets.close()
