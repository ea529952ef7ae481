"""Messages that are sent in pieces, because joining large pieces would copy them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LARGE_BYTES: Final = 64 * 1024


class PiecedMessage:
    """A message that is sent from the memory of its pieces, which must not change any more.

    ``len()`` is the size of the message in bytes.

    Attributes:
        pieces: pairs of a large piece and the joined small parts before it.
    """

    __slots__ = ("_size", "pieces")

    def __init__(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.pieces: list[tuple[bytes, memoryview]] = []
        self._size = sum(map(len, parts))
        before: list[bytes | bytearray | memoryview] = []
        for part in parts:
            if len(part) < _LARGE_BYTES:
                before.append(part)
            else:
                self.pieces.append((b"".join(before), memoryview(part)))
                before = []
        if before:
            self.pieces.append((b"".join(before), memoryview(b"")))

    def __len__(self) -> int:
        return self._size

    def buffers(self) -> list[bytes | memoryview]:
        """Return the non-empty buffers in the order of sending."""
        return [buffer for pair in self.pieces for buffer in pair if buffer]

    def joined(self) -> bytes:
        """Return the message as one copy."""
        return b"".join(self.buffers())
