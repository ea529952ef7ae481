"""gRPC messages in the bytes of a stream: five-byte prefixes and reassembly.

flag (1 byte: compressed or not) | length (4 bytes, big endian) | message
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from struct import Struct
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.aligned_memory import memory_to_fill

__all__ = [
    "ACCEPTED_ENCODINGS",
    "PREFIX_BYTES",
    "MessageBuffer",
    "message_prefix",
]


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
