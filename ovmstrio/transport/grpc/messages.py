"""gRPC messages in the bytes of a stream: five-byte prefixes and reassembly.

flag (1 byte: compressed or not) | length (4 bytes, big endian) | message
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from struct import Struct
from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.encoding.inflate import (
    DEFLATE_BITS,
    GZIP_BITS,
    Inflation,
    InflationError,
    InflationTooLargeError,
    in_inflating_thread,
)
from ovmstrio.transport.send_budget import ByteBudget
from ovmstrio.util.buffers import memory_to_fill

__all__ = ["ACCEPTED_ENCODINGS", "PREFIX_BYTES", "Inflater", "MessageBuffer", "message_prefix"]

# ----------------------------------------------------------------------
# gRPC messages in the bytes of a stream: five-byte prefixes and reassembly
# ----------------------------------------------------------------------

PREFIX_BYTES: Final = 5
ACCEPTED_ENCODINGS: Final = ("identity", "gzip", "deflate")
_PREFIX = Struct(">BL")
_MANY_CHUNKS: Final = 1_024
_ALIGNED_FROM_BYTES: Final = 64 * 1024
_SMALL_CHUNK_BYTES: Final = 512
"""Chunks that are smaller on average are joined when there are many: each is an object of some fifty bytes."""
_unpack_prefix = _PREFIX.unpack_from
_first_messages = count(1)

message_prefix: Final[Callable[[int], bytes]] = partial(_PREFIX.pack, 0)
"""Serialise the prefix of a message that is not compressed, of its length."""


class MessageBuffer:
    """Request bytes of one stream that no reader has taken yet.

    Chunks are joined once, when a message is complete, so a large message is copied once, unless it comes in crumbs.

    Attributes:
        size: bytes in the buffer.
        wanted: the size below which ``take`` has nothing new to say; known after a ``take`` that gave ``None``.
        whole_at: the place of the first message among those of all buffers, by its last byte; 0 while it is incomplete.
    """

    __slots__ = ("_chunks", "_first", "_position", "size", "wanted", "whole_at")

    def __init__(self) -> None:
        self._first: bytes | memoryview = b""
        self._position = 0
        self._chunks: list[bytes | memoryview] = []
        self.size = 0
        self.wanted = 0
        self.whole_at = 0

    def append(self, chunk: bytes | memoryview) -> None:
        """Add the payload of a DATA frame."""
        self.size += len(chunk)
        if self.size > len(chunk):
            self._chunks.append(chunk)
            if len(self._chunks) >= _MANY_CHUNKS and self.size < len(self._chunks) * _SMALL_CHUNK_BYTES:
                self._join()
        else:
            self._first = chunk
            self._position = 0
        if not self.whole_at and self._is_message():
            self.whole_at = next(_first_messages)

    def clear(self) -> None:
        """Drop everything."""
        self._first = b""
        self._chunks = []
        self.size = self.wanted = 0

    def _is_message(self) -> bool:
        """Tell whether a whole message is there."""
        if self.size < max(self.wanted, PREFIX_BYTES):
            return False
        if len(self._first) - self._position < PREFIX_BYTES:
            self._join()
        length: int = _unpack_prefix(self._first, self._position)[1]
        self.wanted = PREFIX_BYTES + length
        return self.size >= self.wanted

    def take(self, max_bytes: int) -> tuple[int, bytes] | None:
        """Take the next message as its flag and its bytes; ``None`` while it is incomplete.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED, when its prefix announces more than ``max_bytes``.
        """
        found = self._next(max_bytes)
        return None if found is None else (found[0], self._cut(found[1]))

    def take_aligned(self, max_bytes: int) -> tuple[int, bytes | memoryview] | None:
        """Take the next message as :meth:`take`; a large one as memory that nobody changes, with its end aligned."""
        found = self._next(max_bytes)
        if found is None:
            return None
        flag, length = found
        if length >= _ALIGNED_FROM_BYTES:
            return flag, self._cut_aligned(length)
        first = self._first
        if self.size or type(first) is not bytes or len(first) - length != PREFIX_BYTES:
            return flag, self._cut(length)
        # The one message of a small request, which has come in one piece.
        self._first = b""
        return flag, first[PREFIX_BYTES:]

    def _next(self, max_bytes: int) -> tuple[int, int] | None:
        """Give the flag and the length of the next message, which is no part of ``size`` any more.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED, when its prefix announces more than ``max_bytes``.
        """
        if self.size < PREFIX_BYTES:
            self.wanted = PREFIX_BYTES
            return None
        if len(self._first) - self._position < PREFIX_BYTES:
            self._join()
        flag, length = _unpack_prefix(self._first, self._position)
        if length > max_bytes:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"request message of {length} bytes is larger than the limit of {max_bytes} bytes"
                " (max_receive_message_bytes)",
            )
        if self.size < PREFIX_BYTES + length:
            self.wanted = PREFIX_BYTES + length
            return None
        self.size -= PREFIX_BYTES + length
        return flag, length

    def _cut(self, length: int) -> bytes:
        parts = self._parts(length)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _cut_aligned(self, length: int) -> memoryview:
        whole, end = memory_to_fill(length), 0
        for part in self._parts(length):
            start, end = end, end + len(part)
            whole[start:end] = part
        return whole.toreadonly()

    def _parts(self, length: int) -> list[bytes | memoryview]:
        """Take the bytes of a message behind its prefix out of the chunks."""
        start = self._position + PREFIX_BYTES
        end = start + length
        if end <= len(self._first):
            parts = [self._first[start:end]]
            self._position = end
        else:
            parts = [self._first[start:]]
            left = length - len(parts[0])
            used = 0
            while left:
                self._first = self._chunks[used]
                used += 1
                parts.append(self._first[:left])
                self._position = len(parts[-1])
                left -= self._position
            del self._chunks[:used]
        if not self.size:
            self._first = b""
        elif self._position == len(self._first):
            self._first = self._chunks.pop(0)
            self._position = 0
        return parts

    def _join(self) -> None:
        self._chunks.insert(0, self._first[self._position :])
        self._first = b"".join(self._chunks)
        self._chunks = []
        self._position = 0


# ----------------------------------------------------------------------
# Messages that come compressed: what those of one connection may become together
# ----------------------------------------------------------------------

_SIZE_BYTES: Final = 4
_INLINE_BYTES: Final = 64 * 1024
"""What is made on the event loop; a thread makes the rest."""


class Inflater:
    """Decompresses the messages of one connection: one at a time, and while those in use leave room for it.

    Args:
        max_bytes: what a message may become, and all of those that are in use together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = ByteBudget(max_bytes)
        self._turn: trio.Lock | None = None

    async def inflate(self, data: bytes, encoding: str = "gzip") -> bytes:
        """Decompress a message, which is in use until it is given back to :meth:`release`.

        ``encoding`` is ``gzip`` or ``deflate``, which is zlib's own form.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED when it is larger than it may be, INVALID_ARGUMENT when it is not so encoded.

        Cancellation: while it waits for others; a thread that works on it is waited for.
        """
        try:
            return await self._inflate(data, encoding)
        except InflationTooLargeError:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"request message is larger than the limit of {self._max_bytes} bytes (max_receive_message_bytes)"
                " after decompression",
            ) from None
        except InflationError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"request message is not valid {encoding}: {error}") from None

    async def _inflate(self, data: bytes, encoding: str) -> bytes:
        is_gzip = encoding == "gzip"
        inflation = Inflation(data, GZIP_BITS if is_gzip else DEFLATE_BITS, self._max_bytes)
        # What it says of its own size: gzip messages end with it, the others do not say.
        told = int.from_bytes(data[-_SIZE_BYTES:], "little") if is_gzip else _INLINE_BYTES
        size = min(told, self._max_bytes)
        if size > _INLINE_BYTES or not self._in_use.take(size):
            return await self._inflate_in_turn(inflation, size)
        try:
            if inflation.go_on(_INLINE_BYTES):
                message = inflation.finish()
                self._in_use.give_back(size - len(message))
                return message
        except InflationError:
            self._in_use.give_back(size)
            raise
        self._in_use.give_back(size)
        return await self._inflate_in_turn(inflation, self._max_bytes)

    async def _inflate_in_turn(self, inflation: Inflation, size: int) -> bytes:
        if self._turn is None:
            self._turn = trio.Lock()
        async with self._turn:
            await self._in_use.wait(size)
            try:
                message = await in_inflating_thread(inflation.finish)
            except BaseException:
                self._in_use.give_back(size)
                raise
            self._in_use.give_back(size - len(message))
            return message

    def release(self, size: int) -> None:
        """Take a message of so many bytes as not in use any more."""
        self._in_use.give_back(size)
