"""Retained metrics of exited workers, so that sums never decrease.

Each worker saves the metrics of its last scrape and, on a normal exit, its final ones.  The parent adds them to the
retained metrics after the exit.

::

    text: active slot, generation │ length, bytes │ length, bytes   a text is complete whenever its writer dies

The generation is odd while metrics are being added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.telemetry.aggregate_metrics import sum_metrics, without_gauges

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_BYTES: Final = 8 * 2**20
"""Size limit of a text; longer ones are not saved."""
_CELL: Final = 8
_HEAD: Final = 2 * _CELL
_SLOT: Final = _CELL + _MOST_BYTES
_TEXT: Final = _HEAD + 2 * _SLOT
_FORMATS: Final = 2


class RetainedMetrics:
    """Saved metrics of all workers in shared memory; untouched pages take no memory."""

    def __init__(self, memory: memoryview, rows: int) -> None:
        self._bytes = memory
        self._past = rows

    @staticmethod
    def size(rows: int) -> int:
        """Return the size in bytes."""
        return (rows + 1) * _FORMATS * _TEXT

    def release(self) -> None:
        """Release the memory."""
        self._bytes.release()

    def leave(self, row: int, text: bytes, *, is_open: bool) -> None:
        """Save the metrics of a worker."""
        if len(text) > _MOST_BYTES:
            return
        start = self._start(row, is_open=is_open)
        slot = 1 - self._number(start)
        at = start + _HEAD + slot * _SLOT
        self._bytes[at + _CELL : at + _CELL + len(text)] = text
        self._set_number(at, len(text))
        self._set_number(start, slot)

    def retain(self, row: int) -> None:
        """Add the metrics of an exited worker to the retained ones, once."""
        for is_open in (False, True):
            text = self._text(row, is_open=is_open)
            if text:
                past = self._text(self._past, is_open=is_open)
                summed = sum_metrics([*filter(None, [past]), without_gauges(text)])
                self._count_change(is_open=is_open)
                self.leave(self._past, summed, is_open=is_open)
                self.leave(row, b"", is_open=is_open)
                self._count_change(is_open=is_open)

    def changes(self, *, is_open: bool) -> int | None:
        """Return the generation of the retained metrics; None while they are updated."""
        number = self._number(self._start(self._past, is_open=is_open) + _CELL)
        return None if number % 2 else number

    def _count_change(self, *, is_open: bool) -> None:
        at = self._start(self._past, is_open=is_open) + _CELL
        self._set_number(at, self._number(at) + 1)

    def past(self, rows: Iterable[int] = (), *, is_open: bool) -> list[bytes]:
        """Return the retained metrics, and saved ones of workers whose exit is not known yet."""
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
