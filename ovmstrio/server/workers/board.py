"""What the processes of one server know of each other, such as how many requests are in flight in all of them.

They share a board: a file in memory with a row for each of them.  Each writes only its own row, so what a
process that died had taken is given back by clearing its row.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ovmstrio.core.limits import refuse_more
from ovmstrio.server.workers.kept_figures import KeptFigures
from ovmstrio.server.workers.ledger_memory import LedgerMemory
from ovmstrio.server.workers.sequence_memory import SequenceMemory, slots_for

__all__ = ["Board", "SharedLimit"]

_IN_FLIGHT: Final = 0
_CLOSED: Final = 1
_READY: Final = 2
_AWAKE: Final = 3
_COLUMNS: Final = 4
_BYTES: Final = 8
_STUCK_SECONDS: Final = 5.0
"""A process whose event loop has shown no life for so long is taken for one that is stuck."""


class Board:
    """What the processes of a project know of each other; a row for each process.

    Args:
        descriptor: of the board's file, which the board owns.
        rows: how many processes there are.

    Attributes:
        ledger: what they count together.
        figures: what those have counted that have ended.
        sequences: which of them has which sequence.
    """

    def __init__(self, descriptor: int, rows: int) -> None:
        self.descriptor = descriptor
        self.rows = rows
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._whole = memoryview(self._memory)
        self._cells = self._whole[: _own_size(rows)].cast("q")
        start = _own_size(rows)
        self.ledger = LedgerMemory(self._whole[start : start + LedgerMemory.size(rows)], rows)
        start += LedgerMemory.size(rows)
        self.figures = KeptFigures(self._whole[start : start + KeptFigures.size(rows)], rows)
        self.sequences = SequenceMemory(self._whole[start + KeptFigures.size(rows) :])

    @classmethod
    def create(cls, rows: int, sequences: int = 0) -> Board:
        """Make a board whose file nobody else can open, for at least so many sequences."""
        descriptor = os.memfd_create("ovmstrio-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(rows) + SequenceMemory.size(slots_for(sequences)))
        return cls(descriptor, rows)

    def close(self) -> None:
        """Give the memory back."""
        self.ledger.release()
        self.figures.release()
        self.sequences.release()
        self._cells.release()
        self._whole.release()
        self._memory.close()
        os.close(self.descriptor)

    def clear(self, row: int, *, keeps_sequences: bool = False) -> None:
        """Forget what a process that has ended had written, but for what it has counted.

        Args:
            row: its number.
            keeps_sequences: whether its successor goes on with its sequences.
        """
        for column in range(_COLUMNS):
            self._cells[row * _COLUMNS + column] = 0
        with self.locked():
            self.ledger.clear(row)
            if not keeps_sequences:
                self.sequences.clear(row)
        self.figures.add_to_past(row)

    def in_flight(self, row: int) -> int:
        """Tell how many requests a process has."""
        return self._cells[row * _COLUMNS + _IN_FLIGHT]

    def total_in_flight(self) -> int:
        """Tell how many requests all processes have together."""
        return sum(self.in_flight(row) for row in range(self.rows))

    def add_in_flight(self, row: int, change: int) -> None:
        """Count requests; for the row's process."""
        self._cells[row * _COLUMNS + _IN_FLIGHT] += change

    def closed_connections(self, row: int) -> int:
        """Tell how many of the connections that it was given a process has closed."""
        return self._cells[row * _COLUMNS + _CLOSED]

    def add_closed_connection(self, row: int) -> None:
        """Count a connection that has been closed; for the row's process."""
        self._cells[row * _COLUMNS + _CLOSED] += 1

    def set_ready(self, row: int, *, ready: bool = True) -> None:
        """Say whether a process can serve; for the row's process."""
        self._cells[row * _COLUMNS + _READY] = ready

    def is_ready(self, row: int) -> bool:
        """Tell whether a process can serve."""
        return bool(self._cells[row * _COLUMNS + _READY])

    def show_life(self, row: int) -> None:
        """Say that the event loop runs; for the row's process, which does so every second once it serves."""
        self._cells[row * _COLUMNS + _AWAKE] = time.monotonic_ns()

    def is_stuck(self, row: int) -> bool:
        """Tell whether a process has shown life, and does not any more."""
        last = self._cells[row * _COLUMNS + _AWAKE]
        return bool(last) and time.monotonic_ns() - last > _STUCK_SECONDS * 1e9

    def set_draining(self) -> None:
        """Say that the server is about to end, which makes it not ready as a whole."""
        self._cells[self.rows * _COLUMNS] = 1

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to end."""
        return bool(self._cells[self.rows * _COLUMNS])

    def all_ready(self) -> bool:
        """Tell whether every process can serve, and is to."""
        return not self.is_draining and all(self.is_ready(row) or self.replaced == row for row in range(self.rows))

    @property
    def replaced(self) -> int:
        """The process in whose place another one is being started on purpose, without which the server is ready."""
        return self._cells[self.rows * _COLUMNS + 2] - 1

    @replaced.setter
    def replaced(self, row: int) -> None:
        self._cells[self.rows * _COLUMNS + 2] = row + 1

    @property
    def log_level(self) -> int:
        """The level that the processes have agreed to log from on, 0 for what each was started with."""
        return self._cells[self.rows * _COLUMNS + 1]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self._cells[self.rows * _COLUMNS + 1] = level

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from counting; the lock of a process that dies is open."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)


def _own_size(rows: int) -> int:
    # Behind the rows are cells that belong to all.
    return (rows * _COLUMNS + 3) * _BYTES


def _size(rows: int) -> int:
    return _own_size(rows) + LedgerMemory.size(rows) + KeptFigures.size(rows)


class SharedLimit:
    """The limit of a project that many processes serve, as one of them has it.

    Args:
        board: what they share.
        row: this process's.
        maximum: how many requests all of them may have in flight; 0 for any number.
    """

    def __init__(self, board: Board, row: int, maximum: int) -> None:
        self._board = board
        self._row = row
        self.maximum = maximum

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        if not self.maximum:
            self._board.add_in_flight(self._row, 1)
            return
        with self._board.locked():
            if self._board.total_in_flight() >= self.maximum:
                raise refuse_more(self.maximum)
            self._board.add_in_flight(self._row, 1)

    def give_back(self) -> None:
        """Count one less."""
        self._board.add_in_flight(self._row, -1)
