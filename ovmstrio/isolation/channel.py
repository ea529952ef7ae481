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

# ----------------------------------------------------------------------
# What goes through the socket between two processes: packets of messages, and of what becomes of their memory
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# A socket between two processes of this machine, for packets that may have files with them
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Messages between the server and a worker process, on trio: small ones in a packet, large ones in shared memory
# ----------------------------------------------------------------------

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
