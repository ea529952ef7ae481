"""A message that is too large to be joined from its pieces for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# ----------------------------------------------------------------------
# A message that is too large to be joined from its pieces for nothing
# ----------------------------------------------------------------------

_LARGE_BYTES: Final = 64 * 1024


class PiecedMessage:
    """A message to be sent from where its pieces lie, which nothing may change any more; its length is its size.

    Attributes:
        pieces: what stands before a large piece, and the piece.
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
        """Give what is to be sent, in order; nothing of it is empty."""
        return [each for pair in self.pieces for each in pair if each]

    def joined(self) -> bytes:
        """Copy it into one."""
        return b"".join(self.buffers())


# ----------------------------------------------------------------------
# Memory for large messages that end with tensors, whose numbers can be used where they lie only if aligned
# ----------------------------------------------------------------------
