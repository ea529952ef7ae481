"""Shared memory of the workers: readiness, counters, retained metrics, sequence owners, and wake-up sockets.

Each worker has a row and writes only its own.  Clearing the row of a dead worker releases everything it held.
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
from ovmstrio.core.limits import too_many_requests
from ovmstrio.core.worker_peers import PeerCounters, TokenBucketLevel
from ovmstrio.workers.handoff import close_on_fork
from ovmstrio.workers.retained_metrics import RetainedMetrics

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# Wake-up sockets

_WAKE_UP: Final = b"!"
_MAX_DATAGRAMS: Final = 64


class WorkerWakeups:
    """Datagram sockets by which workers wake each other.

    Args:
        secret: shared by all workers; part of the socket addresses.
    """

    def __init__(self, secret: str, row: int) -> None:
        self._secret = secret
        self._row = row
        self._socket: socket.socket | None = None

    def _address(self, row: int) -> str:
        return f"\0ovmstrio-{self._secret}-bell-{row}"

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Open the socket of this worker within the block; raises OSError if the address is in use."""
        with close_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as end:
            end.bind(self._address(self._row))
            self._socket = end
            try:
                yield
            finally:
                self._socket = None

    def ring(self, rows: tuple[int, ...]) -> None:
        """Wake other workers; lost or pending wake-ups are harmless."""
        if self._socket is None:
            return
        for row in rows:
            with suppress(OSError):
                self._socket.sendto(_WAKE_UP, self._address(row))

    async def rung(self) -> None:
        """Wait for a wake-up."""
        if self._socket is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.wait_readable(self._socket)
            with suppress(OSError):
                for _ in range(_MAX_DATAGRAMS):
                    self._socket.recv(1)


# Counter table memory

MAX_COUNTER_ROWS: Final = 16_384
_CELL: Final = 8
_OWN_CELLS: Final = 5
_ROW_CELLS: Final = 3
UNDER_WAY, WAITING, SINCE = range(_ROW_CELLS)
"""Cells of a worker's part of a counter row."""
_HASH: Final = struct.Struct("q")
_COUNT, _CHANGES, _HEAD_CELLS = range(3)
_FREE: Final = 0
"""Key of a free counter row."""
_FILLED_AT: Final = 2, 4
"""Cells with the times of the two token buckets."""
_USED_SECONDS: Final = 300.0
"""A counter row with buckets unused for this time may be reassigned."""


def counter_key(name: str) -> int:
    """Return the 64-bit key of a name."""
    (key,) = _HASH.unpack(blake2b(name.encode(), digest_size=_CELL).digest())
    return int(key) or 1


class CounterTable:
    """Counter rows in shared memory; untouched pages take no memory."""

    def __init__(self, memory: memoryview, rows: int) -> None:
        self.rows = rows
        self._bytes = memory
        self.whole = memory.cast("q")
        self.broken = memory.cast("d")
        self._known: dict[int, int] = {}
        self._indexed = 0
        self._changes = 0

    @staticmethod
    def size(rows: int) -> int:
        """Return the size in bytes."""
        return (_HEAD_CELLS + MAX_COUNTER_ROWS * (_OWN_CELLS + rows * _ROW_CELLS)) * _CELL

    def release(self) -> None:
        """Release the memory."""
        self.whole.release()
        self.broken.release()
        self._bytes.release()

    def find(self, key: int) -> int:
        """Return the first cell of a counter row, created if missing; requires the lock.

        Raises:
            NotSupported: the table is full.
        """
        self._update_index()
        place = self._known.get(key)
        if place is not None and self.whole[place] == key:
            return place
        count = self.whole[_COUNT]
        if count < MAX_COUNTER_ROWS:
            place = self._place(count)
            self.whole[place] = key
            self.whole[_COUNT] = count + 1
            return place
        place = self._first_free()
        if place is None:
            self._free_unused()
            place = self._first_free()
        if place is None:
            raise NotSupported(f"shared counter table full: {MAX_COUNTER_ROWS} limits in use")
        self._note_change()
        self.whole[place] = key
        self._known[key] = place
        return place

    def _update_index(self) -> None:
        """Update the local index of counter rows."""
        if self._changes != self.whole[_CHANGES]:
            self._changes, self._indexed = self.whole[_CHANGES], 0
            self._known.clear()
        count = self.whole[_COUNT]
        for number in range(self._indexed, count):
            place = self._place(number)
            self._known[self.whole[place]] = place
        self._indexed = count

    def _note_change(self) -> None:
        """Invalidate the indices of other workers."""
        self._changes = self.whole[_CHANGES] = self.whole[_CHANGES] + 1

    def _first_free(self) -> int | None:
        places = map(self._place, range(self.whole[_COUNT]))
        return next((place for place in places if self.whole[place] == _FREE), None)

    def _free_unused(self) -> None:
        self._note_change()
        now = time.monotonic()
        for place in map(self._place, range(self.whole[_COUNT])):
            if not self._is_used(place, now):
                self._known.pop(self.whole[place], None)
                for cell in range(place, place + _OWN_CELLS):
                    self.whole[cell] = _FREE

    def _is_used(self, place: int, now: float) -> bool:
        rows = range(self.rows)
        if any(self.whole[self.row_at(place, row) + cell] for row in rows for cell in (UNDER_WAY, WAITING)):
            return True
        return now - max(self.broken[place + cell] for cell in _FILLED_AT) < _USED_SECONDS

    def clear(self, row: int) -> None:
        """Clear the counters of an exited worker."""
        for number in range(self.whole[_COUNT]):
            at = self.row_at(self._place(number), row)
            for cell in range(_ROW_CELLS):
                self.whole[at + cell] = 0

    def row_at(self, place: int, row: int) -> int:
        """Return the first cell of a worker's part of a counter row."""
        return place + _OWN_CELLS + row * _ROW_CELLS

    def _place(self, number: int) -> int:
        return _HEAD_CELLS + number * (_OWN_CELLS + self.rows * _ROW_CELLS)


# Counters


class SharedCounterRow:
    """Counter row of one name for one worker; see :class:`ovmstrio.core.worker_peers.CounterRow`.

    Raises:
        NotSupported: the table is full, also when a reassigned row is used again.
    """

    def __init__(self, memory: CounterTable, key: int, row: int) -> None:
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
        """Running calls of this worker."""
        if self._memory.whole[self._place] != self._key:
            self._find()
        return self._memory.whole[self._own + UNDER_WAY]

    def elsewhere(self) -> PeerCounters:
        """Return the counters of other workers."""
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
        return PeerCounters(under_way, waiting, since, rows)

    def write(self, under_way: int, waiting: int = 0, since: float = math.inf) -> None:
        """Set the counters of this worker."""
        whole, at = self._memory.whole, self._own
        whole[at + UNDER_WAY] = under_way
        whole[at + WAITING] = waiting
        self._memory.broken[at + SINCE] = since

    def bucket(self, number: int) -> TokenBucketLevel:
        """Return a token bucket."""
        at = self._place + 1 + 2 * number
        return TokenBucketLevel(self._memory.broken[at], self._memory.broken[at + 1])

    def fill(self, number: int, bucket: TokenBucketLevel) -> None:
        """Set a token bucket."""
        at = self._place + 1 + 2 * number
        self._memory.broken[at], self._memory.broken[at + 1] = bucket


class SharedCounters:
    """Counter table of one worker; see :class:`ovmstrio.core.worker_peers.Counters`."""

    def __init__(self, board: SharedState, row: int, bells: WorkerWakeups) -> None:
        self._board = board
        self._row = row
        self._bells = bells
        self._accounts: dict[str, SharedCounterRow] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Hold the inter-process lock within the block."""
        return self._board.locked()

    def account(self, name: str) -> SharedCounterRow:
        """Return the counter row of a name; raises NotSupported if the table is full."""
        known = self._accounts.get(name)
        if known is None:
            with self._board.locked():
                known = self._accounts[name] = SharedCounterRow(self._board.ledger, counter_key(name), self._row)
        return known

    def ring(self, rows: tuple[int, ...]) -> None:
        """Wake other workers."""
        self._bells.ring(rows)

    async def rung(self) -> None:
        """Wait for a wake-up by another worker."""
        await self._bells.rung()


class ServiceLimit:
    """Concurrency limit of one service over all workers; see :class:`ovmstrio.core.limits.ConcurrencyLimit`."""

    def __init__(self, ledger: SharedCounters, name: str, maximum: int) -> None:
        self._ledger = ledger
        self._account = ledger.account(f"project {name}")
        self.maximum = maximum

    def take(self) -> None:
        """Count a started request; raises TooManyRequests if the limit is reached."""
        with self._ledger.locked():
            if self._account.under_way + self._account.elsewhere().under_way >= self.maximum:
                raise too_many_requests(self.maximum)
            self._account.write(self._account.under_way + 1)

    def give_back(self) -> None:
        """Count a finished request."""
        with self._ledger.locked():
            self._account.write(self._account.under_way - 1)


# Sequence owners

_SEQUENCE_HEAD_CELLS: Final = 1
_TOMBSTONE: Final = 1 << 16
"""Tombstone of a removed slot: no owner, but the search continues."""
_ROW: Final = 0xFFFF
_ROW_BITS: Final = 16
_MIN_SLOTS: Final = 2**16
_MAX_SLOTS: Final = 2**24
_INVERSE_LOAD: Final = 4
_MAX_PROBES: Final = 4096
"""Probe limit; at a load of 25 % a free slot is within a few steps."""
_SCAN_SLOTS: Final = 2**16
"""Slots scanned at once, to bound memory."""
_IDS: Final = 2**64


def slots_for(sequences: int) -> int:
    """Return the number of slots for a number of sequences: a power of two, filled to 25 %."""
    wanted = min(max(sequences * _INVERSE_LOAD, _MIN_SLOTS), _MAX_SLOTS)
    return 1 << (wanted - 1).bit_length()


class SequenceTable:
    """Hash table from sequence key to worker, in shared memory; untouched pages take no memory."""

    def __init__(self, memory: memoryview) -> None:
        self._cells = memory.cast("Q")
        self._slots = self._cells[_SEQUENCE_HEAD_CELLS:]
        self._mask = len(self._slots) - 1

    @staticmethod
    def size(slots: int) -> int:
        """Return the size in bytes."""
        return (_SEQUENCE_HEAD_CELLS + slots) * _CELL

    def release(self) -> None:
        """Release the memory."""
        self._slots.release()
        self._cells.release()

    def find(self, key: int) -> int | None:
        """Return the owner of a 48-bit key, or None."""
        place = self._find(key)
        return None if place is None else (self._slots[place] & _ROW) - 1

    def _find(self, key: int) -> int | None:
        slots, mask = self._slots, self._mask
        place = key & mask
        for _ in range(_MAX_PROBES):
            word = slots[place]
            if word == _FREE:
                return None
            if word >> _ROW_BITS == key and word & _ROW:
                return place
            place = (place + 1) & mask
        return None

    def put(self, key: int, row: int) -> bool:
        """Set the owner of a free key; False if the table is full; requires the lock."""
        slots, mask = self._slots, self._mask
        place = key & mask
        for _ in range(_MAX_PROBES):
            if not slots[place] & _ROW:
                slots[place] = key << _ROW_BITS | row + 1
                return True
            place = (place + 1) & mask
        return False

    def remove(self, key: int) -> None:
        """Remove a key; requires the lock."""
        place = self._find(key)
        if place is not None:
            self._slots[place] = _TOMBSTONE
            self._free_before(place)

    def _free_before(self, place: int) -> None:
        """Free tombstones at the end of a probe chain."""
        slots, mask = self._slots, self._mask
        if slots[(place + 1) & mask] != _FREE:
            return
        while slots[place] != _FREE and not slots[place] & _ROW:
            slots[place] = _FREE
            place = (place - 1) & mask

    def keys(self, row: int) -> list[int]:
        """Return the keys of a worker; requires the lock."""
        found = []
        for start in range(0, len(self._slots), _SCAN_SLOTS):
            words = self._slots[start : start + _SCAN_SLOTS].tolist()
            found += [word >> _ROW_BITS for word in words if word & _ROW == row + 1]
        return found

    def clear(self, row: int) -> None:
        """Remove all keys of a worker; requires the lock."""
        for key in self.keys(row):
            self.remove(key)

    def skip_ids(self, least: int) -> None:
        """Set the minimum of :meth:`next_id`; requires the lock."""
        self._cells[0] = max(self._cells[0], least)

    def next_id(self, least: int) -> int:
        """Return an unused id, at least ``least``; requires the lock."""
        number = max(self._cells[0], least)
        self._cells[0] = (number + 1) % _IDS
        return number


# Shared state

_IN_FLIGHT: Final = 0
_CLOSED: Final = 1
_READY: Final = 2
_LAST_LIFE: Final = 3
_COLUMNS: Final = 4
_BYTES: Final = 8
_STUCK_SECONDS: Final = 5.0
"""A worker whose event loop has shown no life for this time is stuck."""


class SharedState:
    """Shared state of all workers, one row per worker.

    Args:
        descriptor: file of the shared memory, owned by this object.
    """

    def __init__(self, descriptor: int, rows: int) -> None:
        self.descriptor = descriptor
        self.rows = rows
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._view = memoryview(self._memory)
        self._cells = self._view[: _state_size(rows)].cast("q")
        start = _state_size(rows)
        self.ledger = CounterTable(self._view[start : start + CounterTable.size(rows)], rows)
        start += CounterTable.size(rows)
        self.figures = RetainedMetrics(self._view[start : start + RetainedMetrics.size(rows)], rows)
        self.sequences = SequenceTable(self._view[start + RetainedMetrics.size(rows) :])

    @classmethod
    def create(cls, rows: int, sequences: int = 0) -> SharedState:
        """Create the shared memory in an anonymous file, for a number of sequences."""
        descriptor = os.memfd_create("ovmstrio-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _fixed_size(rows) + SequenceTable.size(slots_for(sequences)))
        return cls(descriptor, rows)

    def close(self) -> None:
        """Release the memory."""
        self.ledger.release()
        self.figures.release()
        self.sequences.release()
        self._cells.release()
        self._view.release()
        self._memory.close()
        os.close(self.descriptor)

    def clear(self, row: int, *, keeps_sequences: bool = False) -> None:
        """Clear the row of an exited worker, but not its metrics.

        Args:
            row: index of the worker.
            keeps_sequences: whether its successor restores its sequences.
        """
        for column in range(_COLUMNS):
            self._cells[row * _COLUMNS + column] = 0
        with self.locked():
            self.ledger.clear(row)
            if not keeps_sequences:
                self.sequences.clear(row)
        self.figures.retain(row)

    def in_flight(self, row: int) -> int:
        """Return the running requests of a worker."""
        return self._cells[row * _COLUMNS + _IN_FLIGHT]

    def total_in_flight(self) -> int:
        """Return the running requests of all workers."""
        return sum(self.in_flight(row) for row in range(self.rows))

    def add_in_flight(self, row: int, change: int) -> None:
        """Change the running requests; called by the row's worker."""
        self._cells[row * _COLUMNS + _IN_FLIGHT] += change

    def closed_connections(self, row: int) -> int:
        """Return the number of handed-off connections that a worker has closed."""
        return self._cells[row * _COLUMNS + _CLOSED]

    def add_closed_connection(self, row: int) -> None:
        """Count a closed connection; called by the row's worker."""
        self._cells[row * _COLUMNS + _CLOSED] += 1

    def set_ready(self, row: int, *, ready: bool = True) -> None:
        """Set the readiness; called by the row's worker."""
        self._cells[row * _COLUMNS + _READY] = ready

    def is_ready(self, row: int) -> bool:
        """Return the readiness of a worker."""
        return bool(self._cells[row * _COLUMNS + _READY])

    def show_life(self, row: int) -> None:
        """Record that the event loop runs; called every second by the row's worker."""
        self._cells[row * _COLUMNS + _LAST_LIFE] = time.monotonic_ns()

    def is_stuck(self, row: int) -> bool:
        """Return whether a worker has stopped to show life."""
        last = self._cells[row * _COLUMNS + _LAST_LIFE]
        return bool(last) and time.monotonic_ns() - last > _STUCK_SECONDS * 1e9

    def set_draining(self) -> None:
        """Mark the server as draining, and thereby not ready."""
        self._cells[self.rows * _COLUMNS] = 1

    @property
    def is_draining(self) -> bool:
        """Whether the server is draining."""
        return bool(self._cells[self.rows * _COLUMNS])

    def all_ready(self) -> bool:
        """Return whether every worker is ready."""
        return not self.is_draining and all(self.is_ready(row) or self.replaced == row for row in range(self.rows))

    @property
    def replaced(self) -> int:
        """Worker that is being replaced in a rolling restart; its readiness is ignored."""
        return self._cells[self.rows * _COLUMNS + 2] - 1

    @replaced.setter
    def replaced(self, row: int) -> None:
        self._cells[self.rows * _COLUMNS + 2] = row + 1

    @property
    def log_level(self) -> int:
        """Log level of all workers; 0 for the configured level."""
        return self._cells[self.rows * _COLUMNS + 1]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self._cells[self.rows * _COLUMNS + 1] = level

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the inter-process lock within the block; released when a process dies."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)


def _state_size(rows: int) -> int:
    # Followed by cells shared by all workers.
    return (rows * _COLUMNS + 3) * _BYTES


def _fixed_size(rows: int) -> int:
    return _state_size(rows) + CounterTable.size(rows) + RetainedMetrics.size(rows)


class ProjectLimit:
    """Concurrency limit of a project over all workers."""

    def __init__(self, board: SharedState, row: int, maximum: int) -> None:
        self._board = board
        self._row = row
        self.maximum = maximum

    def take(self) -> None:
        """Count a started request; raises TooManyRequests if the limit is reached."""
        if not self.maximum:
            self._board.add_in_flight(self._row, 1)
            return
        with self._board.locked():
            if self._board.total_in_flight() >= self.maximum:
                raise too_many_requests(self.maximum)
            self._board.add_in_flight(self._row, 1)

    def give_back(self) -> None:
        """Count a finished request."""
        self._board.add_in_flight(self._row, -1)
