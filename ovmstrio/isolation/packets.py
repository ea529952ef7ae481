"""Messages between processes as packets: inline, in shared memory, or packed."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ovmstrio.isolation.codec import Encoded, MappedFile, Region, RegionLease, RegionPool, decode

_PACKED: Final = b"s"


MAX_INLINE_BYTES: Final = 64 * 1024
"""Maximum size of a message inside a packet."""


MAX_PACKET_BYTES: Final = MAX_INLINE_BYTES + 1
"""Maximum packet size."""


MAX_PACKET_DESCRIPTORS: Final = 16
"""Maximum number of descriptors per packet."""


MALFORMED_MESSAGE_ERRORS: Final = (ValueError, LookupError, TypeError, OSError, RecursionError)
"""Exceptions raised for a packet of a process with corrupted memory."""


_INLINE: Final = b"i"


_LENGTH_BYTES: Final = 4


_IN_FILE: Final = b"f"


_RELEASED: Final = b"r"


_DROPPED: Final = b"d"


_HEAD: Final = struct.Struct("<QQQBB")


_NUMBER: Final = struct.Struct("<Q")


class Message(NamedTuple):
    """Received value, descriptor (closed by the receiver), and the trailing bytes of a ``PackedMessage`` message."""

    value: Any
    descriptor: int | None = None
    tail: memoryview | None = None


class PackedMessage(NamedTuple):
    """Small message of JSON and bytes, at a tenth of the usual cost.

    Values outside JSON, such as NaN, are not preserved.
    """

    head: list[Any]
    buffers: Sequence[Any] = ()


def encode_packed(head: list[Any], buffers: Sequence[Any]) -> bytes | None:
    """Encode the packet of a ``PackedMessage`` (JSON and buffers); None if it is too large or not JSON."""
    import orjson  # noqa: PLC0415 - may be missing in the environment of user code, which sends no such messages

    try:
        text = orjson.dumps(head)
    except TypeError:
        return None
    packet = b"".join((_PACKED, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers))
    return packet if len(packet) <= MAX_PACKET_BYTES else None


def encode_inline(value: Any) -> bytes | None:
    """Encode the packet of a value without the state of a channel, in any thread; None if it is too large."""
    encoded = Encoded(value)
    if encoded.size > MAX_INLINE_BYTES:
        return None
    packet = bytearray(len(_INLINE) + encoded.size)
    packet[: len(_INLINE)] = _INLINE
    encoded.write(memoryview(packet)[len(_INLINE) :])
    return bytes(packet)


class PreparedMessage:
    """Message that is written and sent; finished with ``sent`` or ``withdraw``. ``files`` are not owned."""

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
        encoded = Encoded(value, shares_above=MAX_INLINE_BYTES, shares_most=MAX_PACKET_DESCRIPTORS - 2)
        if encoded.size <= MAX_INLINE_BYTES and not encoded.shared:
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

    def withdraw(self, message: PreparedMessage) -> None:
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

        Raises ``MALFORMED_MESSAGE_ERRORS`` exceptions for a malformed packet, whose descriptors are closed.
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
