"""gRPC message framing: length prefixes and reassembly.

Framing: flag (1 byte: compressed or not) | length (4 bytes, big endian) | message
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from struct import Struct
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.util.aligned_memory import memory_to_fill

# -- Reassembly --------------------------------------------------------------------------------------------------------

PREFIX_BYTES: Final = 5
ACCEPTED_ENCODINGS: Final = ("identity", "gzip", "deflate")
_PREFIX = Struct(">BL")
_MAX_SMALL_CHUNKS: Final = 1_024
_MIN_ALIGNED_BYTES: Final = 64 * 1024
_SMALL_CHUNK_BYTES: Final = 512
"""Many chunks with a smaller average size are joined, because each chunk object costs about 50 bytes."""
_unpack_prefix = _PREFIX.unpack_from
_completion_numbers = count(1)

message_prefix: Final[Callable[[int], bytes]] = partial(_PREFIX.pack, 0)
"""Serialise the prefix of an uncompressed message from its length."""


class MessageBuffer:
    """Received, unread request bytes of one stream.

    Chunks are joined once, when a message is complete, so a large message is copied once unless its chunks are tiny.

    Attributes:
        size: bytes in the buffer.
        wanted: size below which the next message is incomplete, as far as known.
        completion_number: completion order of the first message among all buffers of the process; 0 while incomplete.
    """

    __slots__ = ("_chunks", "_first", "_position", "completion_number", "size", "wanted")

    def __init__(self) -> None:
        self._first: bytes | memoryview = b""
        self._position = 0
        self._chunks: list[bytes | memoryview] = []
        self.size = 0
        self.wanted = 0
        self.completion_number = 0

    def append(self, chunk: bytes | memoryview) -> None:
        """Add the payload of a DATA frame."""
        self.size += len(chunk)
        if self.size > len(chunk):
            self._chunks.append(chunk)
            if len(self._chunks) >= _MAX_SMALL_CHUNKS and self.size < len(self._chunks) * _SMALL_CHUNK_BYTES:
                self._join()
        else:
            self._first = chunk
            self._position = 0
        if not self.completion_number and self._has_message():
            self.completion_number = next(_completion_numbers)

    def clear(self) -> None:
        """Drop all bytes."""
        self._first = b""
        self._chunks = []
        self.size = self.wanted = 0

    def _has_message(self) -> bool:
        if self.size < max(self.wanted, PREFIX_BYTES):
            return False
        if len(self._first) - self._position < PREFIX_BYTES:
            self._join()
        length: int = _unpack_prefix(self._first, self._position)[1]
        self.wanted = PREFIX_BYTES + length
        return self.size >= self.wanted

    def take(self, max_bytes: int) -> tuple[int, bytes] | None:
        """Return flag and bytes of the next message, None while it is incomplete.

        Raises ``GRPCError`` with RESOURCE_EXHAUSTED if the message is larger than ``max_bytes``.
        """
        found = self._next(max_bytes)
        return None if found is None else (found[0], self._join_parts(found[1]))

    def take_aligned(self, max_bytes: int) -> tuple[int, bytes | memoryview] | None:
        """Return the next message like :meth:`take`; a large message is a read-only memoryview with an aligned end."""
        found = self._next(max_bytes)
        if found is None:
            return None
        flag, length = found
        if length >= _MIN_ALIGNED_BYTES:
            return flag, self._copy_aligned(length).toreadonly()
        first = self._first
        if self.size or type(first) is not bytes or len(first) - length != PREFIX_BYTES:
            return flag, self._join_parts(length)
        # A small request that consists of one message and arrived in one piece.
        self._first = b""
        return flag, first[PREFIX_BYTES:]

    def take_writable(self) -> tuple[int, memoryview] | None:
        """Return the next message like :meth:`take`, of any size, in separate memory with an aligned end."""
        found = self._next(math.inf)
        return None if found is None else (found[0], self._copy_aligned(found[1]))

    def _next(self, max_bytes: float) -> tuple[int, int] | None:
        """Return flag and length of the next message and subtract the message from ``size``."""
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

    def _join_parts(self, length: int) -> bytes:
        parts = self._parts(length)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _copy_aligned(self, length: int) -> memoryview:
        whole, end = memory_to_fill(length), 0
        for part in self._parts(length):
            start, end = end, end + len(part)
            whole[start:end] = part
        return whole

    def _parts(self, length: int) -> list[bytes | memoryview]:
        """Remove the next message from the chunks and return its parts."""
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
