"""What becomes of each connection, in memory that outlives the process that serves it.

::

    slot:  state, bytes answered so far, bytes kept, bytes of the request at hand, flags, where the answer ends
           │ the bytes that are kept

A slot is a connection's as long as that is open.  The process that serves the connection writes there what it reads,
by the same system call that reads it, and how far it is; when the process has died, its parent finds there what another
process needs to go on.  What ends too early to be written as a whole is seen by the kernel's counts of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from ovmstrio.server.workers.socket_counts import UNCOUNTED, read_bytes, written_bytes

if TYPE_CHECKING:
    import socket

    import trio

__all__ = ["NO_SLOT", "SLOTS", "Journal", "Standing", "State"]

SLOTS: Final = 1024
"""So many connections of a process are kept; those beyond end with it."""
NO_SLOT: Final = -1
_SLOT_BYTES: Final = 64 * 1024
_HEAD_BYTES: Final = 64
_CELL: Final = 8
_SLOT_CELLS: Final = _SLOT_BYTES // _CELL
_UNKNOWN: Final = -1
_STATE, _BASE, _KEPT, _REQUEST, _FULL, _TORN, _WRITTEN, _END = range(8)
_RING_CELLS: Final = SLOTS + 1
"""A count, and the slots of connections that have ended, in a ring."""
_RING_BYTES: Final = -(-_RING_CELLS * _CELL // 4096) * 4096


class State(IntEnum):
    """How far a connection is."""

    FREE = 0
    GIVEN = 1
    """The process has not read from it."""
    WAITING = 2
    """Everything that was read of it is kept, and no code of users has begun for it."""
    BEGUN = 3
    """Code of users runs for the request at hand, and nothing of the answer has been sent."""
    ANSWERING = 4
    """A part of an answer has been sent."""
    UNKNOWN = 5
    """It is of a kind whose bytes are not understood here, as TLS and HTTP/2 are."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a connection stood when its process ended.

    Attributes:
        state: how far it was.
        answered: how many bytes had been answered.
        kept: the bytes that had been read and not been answered; None if they are not all here.
        request: how many of them are the request at hand; None if that is not known.
    """

    state: State
    answered: int
    kept: bytes | None
    request: int | None

    @property
    def may_be_in_flight(self) -> bool:
        """Whether a request had been taken in that another process can answer."""
        return self.state is State.WAITING and self.request != 0 and self.kept is not None


class Journal:
    """The slots of one process.

    Args:
        memory: as many bytes as :meth:`size`, which all processes see.
    """

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._cells = memory.cast("q")

    @staticmethod
    def size() -> int:
        """Tell how many bytes a journal needs; those that nobody wrote to take no memory."""
        return _RING_BYTES + SLOTS * _SLOT_BYTES

    def release(self) -> None:
        """Give the memory back."""
        self._cells.release()
        self._bytes.release()

    def clear(self) -> None:
        """Forget everything, as the process has ended."""
        self._cells[0] = 0
        for slot in range(SLOTS):
            self._cells[self._cell(slot, _STATE)] = State.FREE

    # The process that gives connections

    def give(self, slot: int, answered: int = 0, kept: bytes = b"", written: int = UNCOUNTED) -> None:
        """Begin a slot, of a connection that may have been elsewhere before.

        Args:
            slot: the connection's.
            answered: how many bytes of it have been answered.
            kept: those that have been read besides.
            written: how many bytes have been written to it, as :func:`written_bytes` counts.
        """
        self._write(slot, State.GIVEN, answered, len(kept), 0, 0, 0, written, 0)
        start = self._start(slot)
        self._bytes[start : start + len(kept)] = kept

    def ended_since(self, count: int) -> list[int]:
        """Give the slots whose connections have ended since so many had."""
        return [self._cells[1 + number % SLOTS] for number in range(count, self._cells[0])]

    def standing(self, slot: int, connection: trio.socket.SocketType) -> Standing:
        """Tell where a connection stood whose process has ended.

        Args:
            slot: the connection's.
            connection: the same; by its counts what was read or answered last is found, though that was not written
                down any more.
        """
        cells = self._cells[self._cell(slot, 0) : self._cell(slot, _END + 1)]
        state, base, kept, request, is_full, is_torn, _, end = cells
        known = None if is_full or is_torn else _known_length(connection, base, kept)
        start = self._start(slot)
        data = None if known is None else bytes(self._bytes[start : start + known])
        # The whole answer may have been sent before the process could say so.
        is_whole = state == State.ANSWERING and end and data is not None and 0 < request <= len(data)
        if data is not None and is_whole and written_bytes(connection) == end:
            return Standing(State.WAITING, base + request, data[request:], 0)
        return Standing(State(state), base, data, None if request == _UNKNOWN else request)

    # The process that serves the connection

    def set_state(self, slot: int, state: State) -> None:
        """Say how far a connection is."""
        self._cells[self._cell(slot, _STATE)] = state

    def answered(self, slot: int) -> int:
        """Give how many bytes had been answered when the slot was given, or by now."""
        return self._cells[self._cell(slot, _BASE)]

    def written(self, slot: int) -> int:
        """Give how many bytes had been written to the connection when the slot was given; ``UNCOUNTED`` if unknown."""
        return self._cells[self._cell(slot, _WRITTEN)]

    def end_answer_at(self, slot: int, written: int) -> None:
        """Note that the answer at hand ends once so many bytes have been written."""
        self._cells[self._cell(slot, _END)] = written

    def kept(self, slot: int) -> bytes:
        """Give the bytes that are kept."""
        start = self._start(slot)
        return bytes(self._bytes[start : start + self._cells[self._cell(slot, _KEPT)]])

    def read(self, slot: int, connection: socket.socket) -> bytes | None:
        """Read from a connection into its slot; None, and nothing is read, once that is full.

        Raises:
            OSError: as reading; BlockingIOError if there is nothing.
        """
        cell = self._cell(slot, _KEPT)
        known = self._cells[cell]
        start, end = self._start(slot) + known, self._start(slot + 1) - _HEAD_BYTES
        if start == end:
            self._cells[self._cell(slot, _FULL)] = 1
            return None
        count = connection.recv_into(self._bytes[start:end])
        self._cells[cell] = known + count
        return bytes(self._bytes[start : start + count])

    def begin(self, slot: int, size: int | None) -> None:
        """Note how many bytes the request at hand has."""
        self._cells[self._cell(slot, _REQUEST)] = _UNKNOWN if size is None else size

    def finish(self, slot: int, size: int) -> None:
        """Forget the first bytes, as they have been answered."""
        head = self._cell(slot, 0)
        base, kept = self._cells[head + _BASE], self._cells[head + _KEPT]
        self._cells[head + _TORN] = 1
        start = self._start(slot)
        if kept > size:
            self._bytes[start : start + kept - size] = bytes(self._bytes[start + size : start + kept])
        self._write(slot, State.WAITING, base + size, kept - size, 0, 0, 1)
        self._cells[head + _END] = 0
        self._cells[head + _TORN] = 0

    def restart(self, slot: int, answered: int) -> None:
        """Keep bytes again, after a request that was too large to be kept has been answered."""
        self._cells[self._cell(slot, _TORN)] = 1
        self._write(slot, State.WAITING, answered, 0, 0, 0, 1)
        self._cells[self._cell(slot, _END)] = 0
        self._cells[self._cell(slot, _TORN)] = 0

    def end(self, slot: int) -> None:
        """Say that a connection has ended."""
        self.set_state(slot, State.FREE)
        count = self._cells[0]
        self._cells[1 + count % SLOTS] = slot
        self._cells[0] = count + 1

    def _write(self, slot: int, *values: int) -> None:
        head = self._cell(slot, 0)
        for column, value in enumerate(values):
            self._cells[head + column] = value

    def _cell(self, slot: int, column: int) -> int:
        return _RING_BYTES // _CELL + slot * _SLOT_CELLS + column

    def _start(self, slot: int) -> int:
        return _RING_BYTES + slot * _SLOT_BYTES + _HEAD_BYTES


def _known_length(connection: trio.socket.SocketType, base: int, kept: int) -> int | None:
    """Tell how many bytes of a slot are there; None if some were read that are not.

    A process may have ended between reading bytes and writing how many they were; they are in the slot then.
    """
    count = read_bytes(connection)
    if count == UNCOUNTED:
        return kept
    known = count - base
    return known if 0 <= kept <= known <= _SLOT_BYTES - _HEAD_BYTES else None
