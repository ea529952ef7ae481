"""Memory in which the processes of one server find which of them has a sequence.

::

    the next id │ slots: what stands for an id (48 bits), which process has it (16 bits)

Slots are found by open addressing and never move, and each is written at once, so that looking needs no lock, and a
process may die at any moment.  Changes are made under the board's lock.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SequenceMemory", "slots_for"]

_CELL: Final = 8
_HEAD_CELLS: Final = 1
_FREE: Final = 0
_GONE: Final = 1 << 16
"""What a slot has that had a process: no row, so that nobody finds it, and whoever looks for another goes on."""
_ROW: Final = 0xFFFF
_ROW_BITS: Final = 16
_LEAST_SLOTS: Final = 2**16
_MOST_SLOTS: Final = 2**24
_SPARE: Final = 4
_MOST_STEPS: Final = 4096
"""How far from its place a slot is looked for; one that is a quarter full has a free one within a few."""
_AT_ONCE: Final = 2**16
"""Slots that are taken out at once to be looked through; all of them together may be much memory."""
_IDS: Final = 2**64


def slots_for(sequences: int) -> int:
    """Tell how many slots there are to be for so many sequences: a power of two, a quarter of which they fill."""
    wanted = min(max(sequences * _SPARE, _LEAST_SLOTS), _MOST_SLOTS)
    return 1 << (wanted - 1).bit_length()


class SequenceMemory:
    """The slots, in memory that all processes see; what nobody wrote to takes none.

    Args:
        memory: as many bytes as :meth:`size`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._cells = memory.cast("Q")
        self._slots = self._cells[_HEAD_CELLS:]
        self._mask = len(self._slots) - 1

    @staticmethod
    def size(slots: int) -> int:
        """Tell how many bytes so many slots need."""
        return (_HEAD_CELLS + slots) * _CELL

    def release(self) -> None:
        """Give the memory back."""
        self._slots.release()
        self._cells.release()

    def find(self, key: int) -> int | None:
        """Tell which process has what a key of 48 bits stands for; None if nobody has."""
        place = self._find(key)
        return None if place is None else (self._slots[place] & _ROW) - 1

    def _find(self, key: int) -> int | None:
        slots, mask = self._slots, self._mask
        place = key & mask
        for _ in range(_MOST_STEPS):
            word = slots[place]
            if word == _FREE:
                return None
            if word >> _ROW_BITS == key and word & _ROW:
                return place
            place = (place + 1) & mask
        return None

    def put(self, key: int, row: int) -> bool:
        """Have a process have what nobody has; False if there is no room for it; under the lock."""
        slots, mask = self._slots, self._mask
        place = key & mask
        for _ in range(_MOST_STEPS):
            if not slots[place] & _ROW:
                slots[place] = key << _ROW_BITS | row + 1
                return True
            place = (place + 1) & mask
        return False

    def remove(self, key: int) -> None:
        """Have nobody have it; under the lock."""
        place = self._find(key)
        if place is not None:
            self._slots[place] = _GONE
            self._free_before(place)

    def _free_before(self, place: int) -> None:
        """Free what is left of those that were behind one another, where none is behind them."""
        slots, mask = self._slots, self._mask
        if slots[(place + 1) & mask] != _FREE:
            return
        while slots[place] != _FREE and not slots[place] & _ROW:
            slots[place] = _FREE
            place = (place - 1) & mask

    def keys(self, row: int) -> list[int]:
        """List what a process has; under the lock."""
        found = []
        for start in range(0, len(self._slots), _AT_ONCE):
            words = self._slots[start : start + _AT_ONCE].tolist()
            found += [word >> _ROW_BITS for word in words if word & _ROW == row + 1]
        return found

    def clear(self, row: int) -> None:
        """Have a process have nothing; under the lock."""
        for key in self.keys(row):
            self.remove(key)

    def skip_ids(self, least: int) -> None:
        """Give no number below ``least`` from now on; under the lock."""
        self._cells[0] = max(self._cells[0], least)

    def next_id(self, least: int) -> int:
        """Give a number, not below ``least``, that was not given before; under the lock."""
        number = max(self._cells[0], least)
        self._cells[0] = (number + 1) % _IDS
        return number
