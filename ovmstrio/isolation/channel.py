"""Message channel between two processes: packets over a socket pair, large values in shared memory.

::

    i | value                                           small message
    s | length of JSON | JSON | bytes                   small message on the packed fast path, see Swift
    f | number, region, size | ...                      large message in a region of the sender
    r | number                                          memory of that message released
    d | region                                          region dropped by the sender

Descriptors of an ``f`` packet: the region's own if the peer does not have it yet, then those of files that the
message's arrays refer to, then the one that the sender passes on.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import trio

from ovmstrio.isolation.codec import Encoded, MappedFile, Region, RegionLease, RegionPool, decode

__all__ = [
    "MOST_FILES",
    "MOST_INLINE",
    "MOST_PACKET",
    "NO_MESSAGE",
    "Message",
    "MessageChannel",
    "MessagePackets",
    "PacketSocket",
    "PreparedMessage",
    "Swift",
    "packet_pair",
    "swift_packet",
]

# -- Packets -----------------------------------------------------------------------------------------------------------

MOST_INLINE: Final = 64 * 1024
"""Maximum size of a message inside a packet."""

MOST_PACKET: Final = MOST_INLINE + 1
"""Maximum packet size."""

MOST_FILES: Final = 16
"""Maximum number of descriptors per packet."""

NO_MESSAGE: Final = (ValueError, LookupError, TypeError, OSError, RecursionError)
"""Exceptions raised for a packet of a process with corrupted memory."""

_INLINE: Final = b"i"
_PACKED: Final = b"s"
_LENGTH_BYTES: Final = 4
_IN_FILE: Final = b"f"
_RELEASED: Final = b"r"
_DROPPED: Final = b"d"
_HEAD: Final = struct.Struct("<QQQBB")
_NUMBER: Final = struct.Struct("<Q")


class Message(NamedTuple):
    """Received value, descriptor (closed by the receiver), and the trailing bytes of a ``Swift`` message."""

    value: Any
    descriptor: int | None = None
    tail: memoryview | None = None


class Swift(NamedTuple):
    """Small message of JSON and bytes, at a tenth of the usual cost.

    Values outside JSON, such as NaN, are not preserved.
    """

    head: list[Any]
    buffers: Sequence[Any] = ()


def swift_packet(head: list[Any], buffers: Sequence[Any]) -> bytes | None:
    """Encode the packet of a ``Swift`` message (JSON and contiguous buffers); None if it is too large or not JSON."""
    import orjson  # noqa: PLC0415 - may be missing in the environment of user code, which sends no such messages

    try:
        text = orjson.dumps(head)
    except TypeError:
        return None
    packet = b"".join((_PACKED, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers))
    return packet if len(packet) <= MOST_PACKET else None


class PreparedMessage:
    """Message that is written and sent; finished with ``sent`` or ``withdrawn``. ``files`` are not owned."""

    __slots__ = ("_encoded", "files", "number", "region", "size")

    def __init__(self, encoded: Encoded, number: int, region: Region | None, descriptor: int | None) -> None:
        self._encoded = encoded
        self.number = number
        self.region = region
        self.size = encoded.size
        self.files = [part.mapped.file for part in encoded.shared]
        if region is not None and not region.is_known:
            self.files.insert(0, region.file)
        if descriptor is not None:
            self.files.append(descriptor)

    def write(self) -> bytes | bytearray:
        """Copy the value to its region, if any, and return the packet."""
        region = self.region
        if region is None:
            packet = bytearray(len(_INLINE) + self.size)
            packet[: len(_INLINE)] = _INLINE
            self._encoded.write(memoryview(packet)[len(_INLINE) :])
            return packet
        self._encoded.write(region.bytes[: self.size])
        shared = len(self._encoded.shared)
        return _IN_FILE + _HEAD.pack(self.number, region.number, self.size, not region.is_known, shared)


class MessagePackets:
    """Encoder and decoder of one end, which tracks the memory in use.

    Not thread-safe, except that leases may end in any thread. ``send_now`` sends a packet without blocking, in any
    thread, and returns whether it was sent.
    """

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        self._send_now = send_now
        self._pool = RegionPool()
        self._numbers = 0
        self._in_flight: dict[int, PreparedMessage] = {}
        self._mapped: dict[int, MappedFile] = {}
        self._backlog: deque[bytes] = deque()

    def prepare(self, value: Any, descriptor: int | None = None) -> PreparedMessage:
        """Prepare a message; the caller must call :meth:`sent` or :meth:`withdrawn` for it."""
        encoded = Encoded(value, shares_above=MOST_INLINE, shares_most=MOST_FILES - 2)
        if encoded.size <= MOST_INLINE and not encoded.shared:
            return PreparedMessage(encoded, 0, None, descriptor)
        region = self._pool.take(encoded.size)
        self._numbers += 1
        prepared = PreparedMessage(encoded, self._numbers, region, descriptor)
        self._in_flight[prepared.number] = prepared
        return prepared

    def sent(self, message: PreparedMessage) -> None:
        """Mark a message as sent."""
        if message.region is not None:
            message.region.is_known = True

    def withdrawn(self, message: PreparedMessage) -> None:
        """Release the memory of a message that is not sent."""
        if message.region is not None:
            self._released(message.number)

    @property
    def has_backlog(self) -> bool:
        """Whether packets must be sent before the next message."""
        return bool(self._backlog)

    def backlog(self) -> Iterator[bytes]:
        """Yield the packets that must be sent before the next message.

        A packet is removed when the next one is requested, so that none is lost on cancellation.
        """
        while self._backlog:
            yield self._backlog[0]
            self._backlog.popleft()

    def read(self, packet: bytes, files: list[int]) -> Message | None:
        """Decode a packet and take over its descriptors; return None if it has no message.

        Raises ``NO_MESSAGE`` exceptions for a malformed packet, whose descriptors are closed.
        """
        try:
            return self._read(packet, files)
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def _read(self, packet: bytes, files: list[int]) -> Message | None:
        kind, rest = packet[:1], memoryview(packet)[1:]
        if kind == _INLINE:
            return Message(decode(memoryview(bytearray(rest))), _pop_descriptor(files))
        if kind == _PACKED:
            return _read_packed(rest)
        if kind == _IN_FILE:
            return self._read_from_region(rest, files)
        if files:
            raise ValueError(f"unexpected {len(files)} descriptors with a packet that begins with {packet[:8]!r}")
        number = int.from_bytes(rest, "little")
        if kind == _RELEASED:
            self._released(number)
        elif kind == _DROPPED:
            self._mapped.pop(number, None)
        else:
            raise ValueError(f"unknown packet type: {packet[:8]!r}")
        return None

    def _read_from_region(self, head: memoryview, files: list[int]) -> Message:
        if len(head) != _HEAD.size:
            raise ValueError(f"expected a packet of {_HEAD.size} bytes, got {len(head)}")
        number, region, size, is_new, shared = _HEAD.unpack(head)
        if is_new:
            self._mapped[region] = MappedFile(files.pop(0))
        lease = RegionLease(lambda: self.tell(_RELEASED + _NUMBER.pack(number)))
        source = lease.view(self._mapped[region], 0, size)
        shared_views = []
        for _ in range(shared):
            mapped = MappedFile(files.pop(0))
            shared_views.append(lease.view(mapped, 0, mapped.size))
        return Message(decode(source, shared_views), _pop_descriptor(files))

    def _released(self, number: int) -> None:
        message = self._in_flight.pop(number)
        if message.region is not None:
            for dropped in self._pool.give_back(message.region):
                if dropped.is_known:
                    self.tell(_DROPPED + _NUMBER.pack(dropped.number))

    def tell(self, packet: bytes) -> None:
        """Send a packet now, or before the next message if the socket is full."""
        if not self._send_now(packet):
            self._backlog.append(packet)

    def close(self) -> None:
        """Release all memory without views."""
        self._pool.close()
        for message in self._in_flight.values():
            if message.region is not None:
                message.region.close()
        self._in_flight.clear()
        self._mapped.clear()


def _read_packed(rest: memoryview) -> Message:
    import orjson  # noqa: PLC0415 - may be missing, as in swift_packet

    text_ends = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
    return Message(orjson.loads(rest[_LENGTH_BYTES:text_ends]), tail=rest[text_ends:])


def _pop_descriptor(files: list[int]) -> int | None:
    """Return the descriptor that was passed with the message, if any."""
    if len(files) > 1:
        raise TypeError(f"expected at most one descriptor with a message, got {len(files)}")
    return files.pop() if files else None


# -- Socket ------------------------------------------------------------------------------------------------------------

_DESCRIPTOR: Final = "i"
_DESCRIPTOR_BYTES: Final = array.array(_DESCRIPTOR).itemsize
_FLAGS: Final = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_PACKETS_PER_CHECKPOINT: Final = 16
"""Packets received between checkpoints."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MOST_FILES * _DESCRIPTOR_BYTES)


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
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(_DESCRIPTOR, files))] if files else []
        try:
            await self._socket.sendmsg([packet], rights)
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

    async def receive(self, most: int) -> tuple[bytes, list[int]] | None:
        """Wait for a packet of up to ``most`` bytes; return it with its descriptors, or None when the peer has closed.

        The caller closes the descriptors. A checkpoint only if no packet is waiting, and after every 16 packets.
        """
        self._packets_since_checkpoint += 1
        if self._packets_since_checkpoint > _PACKETS_PER_CHECKPOINT:
            self._packets_since_checkpoint = 0
            await trio.lowlevel.checkpoint()
        try:
            while True:
                with suppress(BlockingIOError):
                    packet, ancillary, _, _ = self._end.recvmsg(most, _ANCILLARY_BYTES, _FLAGS)
                    break
                self._packets_since_checkpoint = 0
                if (number := self._end.fileno()) < 0:
                    return None
                await trio.lowlevel.wait_readable(number)
        except (OSError, trio.ClosedResourceError):
            return None
        if not packet:
            return None
        files = array.array(_DESCRIPTOR)
        for _, _, data in ancillary:
            files.frombytes(data)
        return packet, files.tolist()

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
            self._packets.withdrawn(message)
            raise
        self._packets.sent(message)

    async def send_packet(self, packet: bytes) -> None:
        """Send a packet of :func:`swift_packet`; raises ``BrokenResourceError`` if the peer has exited."""
        if not self.send_packet_now(packet):
            await self._send(packet)

    def send_packet_now(self, packet: bytes) -> bool:
        """Like :meth:`send_packet`, without blocking; return whether the packet was sent."""
        return not (self._send_lock.locked() or self._packets.has_backlog) and self._socket.try_send(packet)

    def send_soon(self, value: Any) -> None:
        """Send a small value without blocking, or drop it. Raises ``TypeError`` if the value cannot be sent."""
        message = self._packets.prepare(value)
        if message.region is None:
            self._socket.send_now(bytes(message.write()))
        else:
            self._packets.withdrawn(message)

    def send_later(self, value: Any) -> None:
        """Send a small value now, or before the next message if the socket is full; raises ``ValueError`` if large."""
        message = self._packets.prepare(value)
        if message.region is not None:
            self._packets.withdrawn(message)
            raise ValueError("only small values can be sent later")
        self._packets.tell(bytes(message.write()))

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

    async def receive(self) -> Message | None:
        """Wait for a message; None when the peer has closed. Raises ``NO_MESSAGE`` errors if malformed."""
        while (received := await self._socket.receive(MOST_PACKET)) is not None:
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
