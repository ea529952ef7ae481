"""Memory in which the processes of one server count together.

::

    count of accounts │ account: its name's hash, two buckets │ a row a process: under way, waiting, since when
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

from ovmstrio.core.errors import NotSupported

__all__ = ["SINCE", "UNDER_WAY", "WAITING", "LedgerMemory"]

ACCOUNTS: Final = 16_384
_CELL: Final = 8
_OWN_CELLS: Final = 5
_ROW_CELLS: Final = 3
UNDER_WAY, WAITING, SINCE = range(_ROW_CELLS)
"""What a row has."""
_HASH: Final = struct.Struct("q")


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

    @staticmethod
    def size(rows: int) -> int:
        """Tell how many bytes the accounts need."""
        return (1 + ACCOUNTS * (_OWN_CELLS + rows * _ROW_CELLS)) * _CELL

    def release(self) -> None:
        """Give the memory back."""
        self.whole.release()
        self.broken.release()
        self._bytes.release()

    def find(self, name: str) -> int:
        """Give the first cell of an account, which is made at first sight; under the lock.

        Raises:
            NotSupported: there is no room for it.
        """
        (key,) = _HASH.unpack(blake2b(name.encode(), digest_size=_CELL).digest())
        count = self.whole[0]
        for number in range(count):
            if self.whole[self._place(number)] == key:
                return self._place(number)
        if count == ACCOUNTS:
            raise NotSupported(f"a server of several processes has had {ACCOUNTS} limits; start it anew for others")
        self.whole[self._place(count)] = key
        self.whole[0] = count + 1
        return self._place(count)

    def clear(self, row: int) -> None:
        """Forget what a process that has ended had under way."""
        for number in range(self.whole[0]):
            at = self.row_at(self._place(number), row)
            for cell in range(_ROW_CELLS):
                self.whole[at + cell] = 0

    def row_at(self, place: int, row: int) -> int:
        """Give the first cell of what a process has of an account."""
        return place + _OWN_CELLS + row * _ROW_CELLS

    def _place(self, number: int) -> int:
        return 1 + number * (_OWN_CELLS + self.rows * _ROW_CELLS)
