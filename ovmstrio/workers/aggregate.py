"""What processes of a server have counted that have ended, so that sums never fall.

Each process leaves what it was asked for last where its parent finds it, and all that it has counted when it ends as it
should.  The parent adds that to the past when the process has ended.

::

    text: which slot holds, count of changes │ length, bytes │ length, bytes   a text is whole whenever its writer dies

The count of the past is odd while a process's figures are on their way to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.telemetry.summed_metrics import counted_only, sum_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KeptFigures"]

_MOST_BYTES: Final = 8 * 2**20
"""How long a text may be; a longer one is not kept."""
_CELL: Final = 8
_HEAD: Final = 2 * _CELL
_SLOT: Final = _CELL + _MOST_BYTES
_TEXT: Final = _HEAD + 2 * _SLOT
_FORMATS: Final = 2


class KeptFigures:
    """The texts of all processes, in memory that all see; what nobody wrote to takes none.

    Args:
        memory: as many bytes as :meth:`size`.
        rows: how many processes there are.
    """

    def __init__(self, memory: memoryview, rows: int) -> None:
        self._bytes = memory
        self._past = rows

    @staticmethod
    def size(rows: int) -> int:
        """Tell how many bytes the texts need."""
        return (rows + 1) * _FORMATS * _TEXT

    def release(self) -> None:
        """Give the memory back."""
        self._bytes.release()

    def leave(self, row: int, text: bytes, *, is_open: bool) -> None:
        """Have the figures of a process be what is added to the past when it ends."""
        if len(text) > _MOST_BYTES:
            return
        start = self._start(row, is_open=is_open)
        slot = 1 - self._number(start)
        at = start + _HEAD + slot * _SLOT
        self._bytes[at + _CELL : at + _CELL + len(text)] = text
        self._set_number(at, len(text))
        self._set_number(start, slot)

    def add_to_past(self, row: int) -> None:
        """Add the figures of a process that has ended to the past, once."""
        for is_open in (False, True):
            text = self._text(row, is_open=is_open)
            if text:
                past = self._text(self._past, is_open=is_open)
                summed = sum_metrics([*filter(None, [past]), counted_only(text)])
                self._count_change(is_open=is_open)
                self.leave(self._past, summed, is_open=is_open)
                self.leave(row, b"", is_open=is_open)
                self._count_change(is_open=is_open)

    def changes(self, *, is_open: bool) -> int | None:
        """Count how often there have been more figures in the past; None while there are going to be."""
        number = self._number(self._start(self._past, is_open=is_open) + _CELL)
        return None if number % 2 else number

    def _count_change(self, *, is_open: bool) -> None:
        at = self._start(self._past, is_open=is_open) + _CELL
        self._set_number(at, self._number(at) + 1)

    def past(self, rows: Iterable[int] = (), *, is_open: bool) -> list[bytes]:
        """Give what processes have counted that have ended, also those in some rows of which nobody knows that yet."""
        texts = [self._text(row, is_open=is_open) for row in (*rows, self._past)]
        return list(filter(None, texts))

    def _text(self, row: int, *, is_open: bool) -> bytes:
        start = self._start(row, is_open=is_open)
        at = start + _HEAD + self._number(start) * _SLOT
        return bytes(self._bytes[at + _CELL : at + _CELL + self._number(at)])

    def _start(self, row: int, *, is_open: bool) -> int:
        return (row * _FORMATS + is_open) * _TEXT

    def _number(self, at: int) -> int:
        return int.from_bytes(self._bytes[at : at + _CELL], "little")

    def _set_number(self, at: int, number: int) -> None:
        self._bytes[at : at + _CELL] = number.to_bytes(_CELL, "little")
