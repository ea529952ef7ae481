"""Memory in which the processes of one server count together.

::

    counts of accounts, and of changes of names │ account: its name's hash, 2 buckets │ a row a process: under way ...

Whoever has found an account sees before each use that it has the same name still: where there is no room for another
one, those go that nobody has used of late.
"""

from __future__ import annotations

import struct
import time
from hashlib import blake2b
from typing import Final

from ovmstrio.core.errors import NotSupported

__all__ = ["SINCE", "UNDER_WAY", "WAITING", "LedgerMemory", "key_of"]

ACCOUNTS: Final = 16_384
_CELL: Final = 8
_OWN_CELLS: Final = 5
_ROW_CELLS: Final = 3
UNDER_WAY, WAITING, SINCE = range(_ROW_CELLS)
"""What a row has."""
_HASH: Final = struct.Struct("q")
_COUNT, _CHANGES, _HEAD_CELLS = range(3)
_FREE: Final = 0
"""What an account has for a name that nobody has."""
_FILLED_AT: Final = 2, 4
"""Where an account has it when its buckets were counted."""
_USED_SECONDS: Final = 300.0
"""An account whose buckets nobody has used for so long may be another name's."""


def key_of(name: str) -> int:
    """Give what stands for a name."""
    (key,) = _HASH.unpack(blake2b(name.encode(), digest_size=_CELL).digest())
    return int(key) or 1


class LedgerMemory:
    """The accounts, in memory that all processes see; what nobody wrote to takes none.

    Args:
        memory: as many bytes as :meth:`size`.
        rows: how many processes there are.
    """

    def __init__(self, memory: memoryview, rows: int) -> None:
        self.rows = rows
        self._bytes = memory
        self.whole = memory.cast("q")
        self.broken = memory.cast("d")
        self._known: dict[int, int] = {}
        self._looked_at = 0
        self._changes = 0

    @staticmethod
    def size(rows: int) -> int:
        """Tell how many bytes the accounts need."""
        return (_HEAD_CELLS + ACCOUNTS * (_OWN_CELLS + rows * _ROW_CELLS)) * _CELL

    def release(self) -> None:
        """Give the memory back."""
        self.whole.release()
        self.broken.release()
        self._bytes.release()

    def find(self, key: int) -> int:
        """Give the first cell of an account, which is made at first sight; under the lock.

        Raises:
            NotSupported: there is no room for it.
        """
        self._look()
        place = self._known.get(key)
        if place is not None and self.whole[place] == key:
            return place
        count = self.whole[_COUNT]
        if count < ACCOUNTS:
            place = self._place(count)
            self.whole[place] = key
            self.whole[_COUNT] = count + 1
            return place
        place = self._first_free()
        if place is None:
            self._free_unused()
            place = self._first_free()
        if place is None:
            raise NotSupported(f"a server of several processes has {ACCOUNTS} limits in use, which is all it can count")
        self._note_change()
        self.whole[place] = key
        self._known[key] = place
        return place

    def _look(self) -> None:
        """Know the accounts that there are."""
        if self._changes != self.whole[_CHANGES]:
            self._changes, self._looked_at = self.whole[_CHANGES], 0
            self._known.clear()
        count = self.whole[_COUNT]
        for number in range(self._looked_at, count):
            place = self._place(number)
            self._known[self.whole[place]] = place
        self._looked_at = count

    def _note_change(self) -> None:
        """Have other processes look at all names again."""
        self._changes = self.whole[_CHANGES] = self.whole[_CHANGES] + 1

    def _first_free(self) -> int | None:
        places = map(self._place, range(self.whole[_COUNT]))
        return next((place for place in places if self.whole[place] == _FREE), None)

    def _free_unused(self) -> None:
        """Have accounts have no name any more that are not in use."""
        self._note_change()
        now = time.monotonic()
        for place in map(self._place, range(self.whole[_COUNT])):
            if not self._is_used(place, now):
                self._known.pop(self.whole[place], None)
                for cell in range(place, place + _OWN_CELLS):
                    self.whole[cell] = _FREE

    def _is_used(self, place: int, now: float) -> bool:
        """Tell whether calls are under way or wait, or somebody has used the buckets of late."""
        rows = range(self.rows)
        if any(self.whole[self.row_at(place, row) + cell] for row in rows for cell in (UNDER_WAY, WAITING)):
            return True
        return now - max(self.broken[place + cell] for cell in _FILLED_AT) < _USED_SECONDS

    def clear(self, row: int) -> None:
        """Forget what a process that has ended had under way."""
        for number in range(self.whole[_COUNT]):
            at = self.row_at(self._place(number), row)
            for cell in range(_ROW_CELLS):
                self.whole[at + cell] = 0

    def row_at(self, place: int, row: int) -> int:
        """Give the first cell of what a process has of an account."""
        return place + _OWN_CELLS + row * _ROW_CELLS

    def _place(self, number: int) -> int:
        return _HEAD_CELLS + number * (_OWN_CELLS + self.rows * _ROW_CELLS)
