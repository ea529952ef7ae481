"""What goes through the socket between two processes: packets of messages, and of what becomes of their memory.

::

    i | value                                           a small message, in the packet itself
    s | length of JSON | JSON | bytes                   a small one that has been made for speed: see Swift
    f | number, region, size | ...                      a large one, which lies in a region of the sender's
    r | number                                          nobody looks at the memory of that message any more
    d | region                                          the sender has dropped a region

Descriptors go with an ``f``: the region's own if the other end does not have it yet, those of files of others that the
message's arrays lie in, and one that its sender wants to give away.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ovmstrio.work.messages.regions import MappedFile, Region, RegionLease, RegionPool
from ovmstrio.work.messages.value_codec import Encoded, decode

__all__ = [
    "MOST_FILES",
    "MOST_INLINE",
    "MOST_PACKET",
    "NO_MESSAGE",
    "Message",
    "MessagePackets",
    "PreparedMessage",
    "Swift",
    "swift_packet",
]

MOST_INLINE: Final = 64 * 1024
"""How many bytes a message has at most that goes in a packet itself."""

MOST_PACKET: Final = MOST_INLINE + 1
"""How many bytes a packet has at most."""

MOST_FILES: Final = 16
"""How many files a packet has at most."""

NO_MESSAGE: Final = (ValueError, LookupError, TypeError, OSError, RecursionError)
"""What reading a message raises if a process whose memory is broken has written it."""

_INLINE: Final = b"i"
_SWIFT: Final = b"s"
_LENGTH_BYTES: Final = 4
_IN_FILE: Final = b"f"
_RELEASED: Final = b"r"
_DROPPED: Final = b"d"
_HEAD: Final = struct.Struct("<QQQBB")
_NUMBER: Final = struct.Struct("<Q")


class Message(NamedTuple):
    """What has come: a value, a descriptor, which its receiver closes, and the bytes of a swift one."""

    value: Any
    descriptor: int | None = None
    tail: memoryview | None = None


class Swift(NamedTuple):
    """A small value that is JSON alone, and bytes; it costs a tenth of any other.

    What is no JSON, such as a number that is not finite, does not come as what it was.
    """

    head: list[Any]
    buffers: Sequence[Any] = ()


def swift_packet(head: list[Any], buffers: Sequence[Any]) -> bytes | None:
    """Make the packet of a swift message; None if it is too large, or no JSON, for one.

    Args:
        head: JSON.
        buffers: whose bytes follow it; contiguous.
    """
    import orjson  # noqa: PLC0415 - user code's own environment may have none, and no such messages

    try:
        text = orjson.dumps(head)
    except TypeError:
        return None
    packet = b"".join((_SWIFT, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers))
    return packet if len(packet) <= MOST_PACKET else None


class PreparedMessage:
    """A message on its way; it is written, sent, and told to be sent or not.

    Attributes:
        size: how many bytes :meth:`write` writes.
        files: the descriptors that go with the packet, which remain their owners'.
    """

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
        """Copy the value to where the other end finds it, and give the packet."""
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
    """One end: makes packets of messages and messages of packets, and knows whose memory is in use.

    Not for several threads at once, except that leases may end in any thread.

    Args:
        send_now: sends a packet at once if there is room for it and says whether there was; from any thread.
    """

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        self._send_now = send_now
        self._pool = RegionPool()
        self._numbers = 0
        self._under_way: dict[int, PreparedMessage] = {}
        self._mapped: dict[int, MappedFile] = {}
        self._backlog: deque[bytes] = deque()

    def prepare(self, value: Any, descriptor: int | None = None) -> PreparedMessage:
        """Find a place for a message; whoever asks for it sees that it is :meth:`sent` or :meth:`withdrawn`.

        Raises:
            TypeError: the value is not of what can be sent.
            OSError: there is no memory left.
        """
        encoded = Encoded(value, shares_above=MOST_INLINE, shares_most=MOST_FILES - 2)
        if encoded.size <= MOST_INLINE and not encoded.shared:
            return PreparedMessage(encoded, 0, None, descriptor)
        region = self._pool.take(encoded.size)
        self._numbers += 1
        prepared = PreparedMessage(encoded, self._numbers, region, descriptor)
        self._under_way[prepared.number] = prepared
        return prepared

    def sent(self, message: PreparedMessage) -> None:
        """Note that the other end has the message."""
        if message.region is not None:
            message.region.is_known = True

    def withdrawn(self, message: PreparedMessage) -> None:
        """Note that a message will not be sent."""
        if message.region is not None:
            self._released(message.number)

    @property
    def has_backlog(self) -> bool:
        """Whether there are packets that are to be sent before the next one."""
        return bool(self._backlog)

    def backlog(self) -> Iterator[bytes]:
        """Take the packets that are to be sent before the next one, because there was no room for them before.

        One is taken when the next one is asked for, so that who is interrupted loses none.
        """
        while self._backlog:
            yield self._backlog[0]
            self._backlog.popleft()

    def read(self, packet: bytes, files: list[int]) -> Message | None:
        """Read a packet, whose files are this object's from now on; None if it brings no message.

        Ownership: the value, with arrays that nobody else has, and the descriptor.

        Raises:
            ValueError, LookupError, TypeError, OSError, RecursionError: it is no packet of the other end's; its files
                have been closed.
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
            return Message(decode(memoryview(bytearray(rest))), _taken(files))
        if kind == _SWIFT:
            return _read_swift(rest)
        if kind == _IN_FILE:
            return self._of_file(rest, files)
        if files:
            raise ValueError(f"{len(files)} descriptors with a packet that begins with {packet[:8]!r}")
        number = int.from_bytes(rest, "little")
        if kind == _RELEASED:
            self._released(number)
        elif kind == _DROPPED:
            self._mapped.pop(number, None)
        else:
            raise ValueError(f"a packet that begins with {packet[:8]!r}")
        return None

    def _of_file(self, head: memoryview, files: list[int]) -> Message:
        if len(head) != _HEAD.size:
            raise ValueError(f"a packet of {len(head)} bytes")
        number, region, size, is_new, shared = _HEAD.unpack(head)
        if is_new:
            self._mapped[region] = MappedFile(files.pop(0))
        lease = RegionLease(lambda: self.tell(_RELEASED + _NUMBER.pack(number)))
        source = lease.view(self._mapped[region], 0, size)
        others = []
        for _ in range(shared):
            mapped = MappedFile(files.pop(0))
            others.append(lease.view(mapped, 0, mapped.size))
        return Message(decode(source, others), _taken(files))

    def _released(self, number: int) -> None:
        message = self._under_way.pop(number)
        if message.region is not None:
            for dropped in self._pool.give_back(message.region):
                if dropped.is_known:
                    self.tell(_DROPPED + _NUMBER.pack(dropped.number))

    def tell(self, packet: bytes) -> None:
        """Send a packet at once, or before the next one, where there is no room for it."""
        if not self._send_now(packet):
            self._backlog.append(packet)

    def close(self) -> None:
        """Let go of all memory, as far as nobody looks at it."""
        self._pool.close()
        for message in self._under_way.values():
            if message.region is not None:
                message.region.close()
        self._under_way.clear()
        self._mapped.clear()


def _read_swift(rest: memoryview) -> Message:
    import orjson  # noqa: PLC0415 - as above

    text_ends = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
    return Message(orjson.loads(rest[_LENGTH_BYTES:text_ends]), tail=rest[text_ends:])


def _taken(files: list[int]) -> int | None:
    """Take the last file, which is given away with the message, if there is one.

    Raises:
        TypeError: there are more.
    """
    if len(files) > 1:
        raise TypeError(f"{len(files)} descriptors with one message")
    return files.pop() if files else None
