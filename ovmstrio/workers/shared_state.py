"""What the processes of one server know of each other, such as how many requests are in flight in all of them.

They share a board: a file in memory with a row for each of them.  Each writes only its own row, so what a
process that died had taken is given back by clearing its row.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import NotSupported
from ovmstrio.core.limits import refuse_more
from ovmstrio.core.worker_peers import Bucket, Elsewhere
from ovmstrio.workers.aggregate import KeptFigures
from ovmstrio.workers.handoff import noted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "SINCE",
    "UNDER_WAY",
    "WAITING",
    "Bells",
    "Board",
    "LedgerLimit",
    "LedgerMemory",
    "SequenceMemory",
    "SharedLedger",
    "SharedLimit",
    "key_of",
    "slots_for",
]

# ----------------------------------------------------------------------
# How the processes of one server wake each other: each has an address, and a byte to it says no more than "look"
# ----------------------------------------------------------------------

_LOOK: Final = b"!"
_MOST: Final = 64


class Bells:
    """The bells of all processes, as one of them has them.

    Args:
        secret: a text that all of them, and nobody else, have.
        row: this one's number.
    """

    def __init__(self, secret: str, row: int) -> None:
        self._secret = secret
        self._row = row
        self._end: socket.socket | None = None

    def _address(self, row: int) -> str:
        return f"\0ovmstrio-{self._secret}-bell-{row}"

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Have others ring this process within the block.

        Raises:
            OSError: the address is taken.

        Ownership: the socket.
        """
        with noted(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as end:
            end.bind(self._address(self._row))
            self._end = end
            try:
                yield
            finally:
                self._end = None

    def ring(self, rows: tuple[int, ...]) -> None:
        """Ring others; one that is not there has nobody to look, and one that has not heard yet need not hear more."""
        if self._end is None:
            return
        for row in rows:
            with suppress(OSError):
                self._end.sendto(_LOOK, self._address(row))

    async def rung(self) -> None:
        """Wait until somebody has rung.

        Cancellation: at once.
        """
        if self._end is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.wait_readable(self._end)
            with suppress(OSError):
                for _ in range(_MOST):
                    self._end.recv(1)


# ----------------------------------------------------------------------
# Memory in which the processes of one server count together
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# What the processes of one server count together: requests under way, those that wait, and buckets of tokens
# ----------------------------------------------------------------------


class SharedAccount:
    """What is counted under one name, as one process sees it; see :class:`ovmstrio.core.worker_peers.Account`.

    Args:
        memory: where it is.
        key: what stands for the name.
        row: this process's.

    Raises:
        NotSupported: there is no room for it; also where what was not used for long is to be used again.
    """

    def __init__(self, memory: LedgerMemory, key: int, row: int) -> None:
        self._memory = memory
        self._key = key
        self._row = row
        self._find()

    def _find(self) -> None:
        memory = self._memory
        self._place = place = memory.find(self._key)
        self._own = memory.row_at(place, self._row)
        self._others = tuple((each, memory.row_at(place, each)) for each in range(memory.rows) if each != self._row)

    @property
    def under_way(self) -> int:
        """What this process has written."""
        if self._memory.whole[self._place] != self._key:
            self._find()
        return self._memory.whole[self._own + UNDER_WAY]

    def elsewhere(self) -> Elsewhere:
        """Tell what other processes have."""
        whole = self._memory.whole
        if whole[self._place] != self._key:
            self._find()
        under_way = waiting = 0
        since = math.inf
        rows: tuple[int, ...] = ()
        for row, at in self._others:
            under_way += whole[at + UNDER_WAY]
            if count := whole[at + WAITING]:
                waiting += count
                rows = (*rows, row)
                since = min(since, self._memory.broken[at + SINCE])
        return Elsewhere(under_way, waiting, since, rows)

    def write(self, under_way: int, waiting: int = 0, since: float = math.inf) -> None:
        """Tell others what this process has."""
        whole, at = self._memory.whole, self._own
        whole[at + UNDER_WAY] = under_way
        whole[at + WAITING] = waiting
        self._memory.broken[at + SINCE] = since

    def bucket(self, number: int) -> Bucket:
        """Read a bucket."""
        at = self._place + 1 + 2 * number
        return Bucket(self._memory.broken[at], self._memory.broken[at + 1])

    def fill(self, number: int, bucket: Bucket) -> None:
        """Write a bucket."""
        at = self._place + 1 + 2 * number
        self._memory.broken[at], self._memory.broken[at + 1] = bucket


class SharedLedger:
    """The accounts of a server, as one of its processes sees them; see :class:`ovmstrio.core.worker_peers.Ledger`.

    Args:
        board: has their memory, and its lock.
        row: this process's.
        bells: by which processes wake each other.
    """

    def __init__(self, board: Board, row: int, bells: Bells) -> None:
        self._board = board
        self._row = row
        self._bells = bells
        self._accounts: dict[str, SharedAccount] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from reading and writing."""
        return self._board.locked()

    def account(self, name: str) -> SharedAccount:
        """Give what is counted under a name.

        Raises:
            NotSupported: there is no room for it.
        """
        known = self._accounts.get(name)
        if known is None:
            with self._board.locked():
                known = self._accounts[name] = SharedAccount(self._board.ledger, key_of(name), self._row)
        return known

    def ring(self, rows: tuple[int, ...]) -> None:
        """Have other processes look."""
        self._bells.ring(rows)

    async def rung(self) -> None:
        """Wait until another process has rung.

        Cancellation: at once.
        """
        await self._bells.rung()


class LedgerLimit:
    """The limit of one service of many, over all processes; see :class:`ovmstrio.core.limits.ConcurrencyLimit`.

    Args:
        ledger: counts.
        name: of the service.
        maximum: how many requests all processes may have in flight.
    """

    def __init__(self, ledger: SharedLedger, name: str, maximum: int) -> None:
        self._ledger = ledger
        self._account = ledger.account(f"project {name}")
        self.maximum = maximum

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        with self._ledger.locked():
            if self._account.under_way + self._account.elsewhere().under_way >= self.maximum:
                raise refuse_more(self.maximum)
            self._account.write(self._account.under_way + 1)

    def give_back(self) -> None:
        """Count one less."""
        with self._ledger.locked():
            self._account.write(self._account.under_way - 1)


# ----------------------------------------------------------------------
# Memory in which the processes of one server find which of them has a sequence
# ----------------------------------------------------------------------

_SEQUENCE_HEAD_CELLS: Final = 1
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
        self._slots = self._cells[_SEQUENCE_HEAD_CELLS:]
        self._mask = len(self._slots) - 1

    @staticmethod
    def size(slots: int) -> int:
        """Tell how many bytes so many slots need."""
        return (_SEQUENCE_HEAD_CELLS + slots) * _CELL

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


# ----------------------------------------------------------------------
# What the processes of one server know of each other, such as how many requests are in flight in all of them
# ----------------------------------------------------------------------

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
