"""Shared memory of the workers: readiness, counters and retained metrics; and sockets by which workers wake each other.

Each worker has a row and writes only that row.  Clearing the row of a dead worker releases everything it held.  Counts
of several rows are read and changed under one lock, which a stopped process cannot keep from the others.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import struct
import time
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import NotSupported
from ovmstrio.core.limits import too_many_requests
from ovmstrio.core.worker_peers import SERVER_COUNTER, PeerCounters, TokenBucketLevel
from ovmstrio.telemetry.aggregate_metrics import sum_metrics, without_gauges
from ovmstrio.workers.handoff import close_on_fork

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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
        return f"\0ovmstrio-{self._secret}-wakeup-{row}"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the socket of this worker within the block; raises OSError if the address is in use."""
        with close_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as end:
            end.bind(self._address(self._row))
            self._socket = end
            try:
                yield
            finally:
                self._socket = None

    def notify(self, rows: tuple[int, ...]) -> None:
        """Wake other workers; lost or pending wake-ups are harmless."""
        if self._socket is None:
            return
        for row in rows:
            with suppress(OSError):
                self._socket.sendto(_WAKE_UP, self._address(row))

    async def wait(self) -> None:
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
IN_FLIGHT, WAITING, SINCE = range(_ROW_CELLS)
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
        self.ints = memory.cast("q")
        self.floats = memory.cast("d")
        self._known: dict[int, int] = {}
        self._indexed = 0
        self._changes = 0

    @staticmethod
    def size(rows: int) -> int:
        """Return the size in bytes."""
        return (_HEAD_CELLS + MAX_COUNTER_ROWS * (_OWN_CELLS + rows * _ROW_CELLS)) * _CELL

    def release(self) -> None:
        """Release the memory."""
        self.ints.release()
        self.floats.release()
        self._bytes.release()

    def find(self, key: int) -> int:
        """Return the first cell of a counter row, created if missing; requires the lock.

        Raises:
            NotSupported: the table is full.
        """
        self._update_index()
        place = self._known.get(key)
        if place is not None and self.ints[place] == key:
            return place
        count = self.ints[_COUNT]
        if count < MAX_COUNTER_ROWS:
            place = self._place(count)
            self.ints[place] = key
            self.ints[_COUNT] = count + 1
            return place
        place = self._first_free()
        if place is None:
            self._free_unused()
            place = self._first_free()
        if place is None:
            raise NotSupported(f"shared counter table full: {MAX_COUNTER_ROWS} limits in use")
        self._note_change()
        self.ints[place] = key
        self._known[key] = place
        return place

    def _update_index(self) -> None:
        """Update the local index of counter rows."""
        if self._changes != self.ints[_CHANGES]:
            self._changes, self._indexed = self.ints[_CHANGES], 0
            self._known.clear()
        count = self.ints[_COUNT]
        for number in range(self._indexed, count):
            place = self._place(number)
            self._known[self.ints[place]] = place
        self._indexed = count

    def _note_change(self) -> None:
        """Invalidate the indices of other workers."""
        self._changes = self.ints[_CHANGES] = self.ints[_CHANGES] + 1

    def _first_free(self) -> int | None:
        places = map(self._place, range(self.ints[_COUNT]))
        return next((place for place in places if self.ints[place] == _FREE), None)

    def _free_unused(self) -> None:
        self._note_change()
        now = time.monotonic()
        for place in map(self._place, range(self.ints[_COUNT])):
            if not self._is_used(place, now):
                self._known.pop(self.ints[place], None)
                for cell in range(place, place + _OWN_CELLS):
                    self.ints[cell] = _FREE

    def _is_used(self, place: int, now: float) -> bool:
        rows = range(self.rows)
        if any(self.ints[self.row_at(place, row) + cell] for row in rows for cell in (IN_FLIGHT, WAITING)):
            return True
        return now - max(self.floats[place + cell] for cell in _FILLED_AT) < _USED_SECONDS

    def waiting(self, row: int, server_key: int) -> int:
        """Return the calls that wait in the queues of a worker; those of services are also in the server's."""
        places = map(self._place, range(self.ints[_COUNT]))
        counts = [(self.ints[place], self.ints[self.row_at(place, row) + WAITING]) for place in places]
        of_server = sum(count for key, count in counts if key == server_key)
        return max(of_server, sum(count for key, count in counts if key != server_key))

    def clear(self, row: int) -> None:
        """Clear the counters of an exited worker."""
        for number in range(self.ints[_COUNT]):
            at = self.row_at(self._place(number), row)
            for cell in range(_ROW_CELLS):
                self.ints[at + cell] = 0

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
    def in_flight(self) -> int:
        """Running calls of this worker."""
        if self._memory.ints[self._place] != self._key:
            self._find()
        return self._memory.ints[self._own + IN_FLIGHT]

    def elsewhere(self) -> PeerCounters:
        """Return the counters of other workers."""
        ints = self._memory.ints
        if ints[self._place] != self._key:
            self._find()
        in_flight = waiting = 0
        since = math.inf
        rows: tuple[int, ...] = ()
        for row, at in self._others:
            in_flight += ints[at + IN_FLIGHT]
            if count := ints[at + WAITING]:
                waiting += count
                rows = (*rows, row)
                since = min(since, self._memory.floats[at + SINCE])
        return PeerCounters(in_flight, waiting, since, rows)

    def write(self, in_flight: int, waiting: int = 0, since: float = math.inf) -> None:
        """Set the counters of this worker."""
        ints, at = self._memory.ints, self._own
        ints[at + IN_FLIGHT] = in_flight
        ints[at + WAITING] = waiting
        self._memory.floats[at + SINCE] = since

    def bucket(self, number: int) -> TokenBucketLevel:
        """Return a token bucket."""
        at = self._place + 1 + 2 * number
        return TokenBucketLevel(self._memory.floats[at], self._memory.floats[at + 1])

    def fill(self, number: int, bucket: TokenBucketLevel) -> None:
        """Set a token bucket."""
        at = self._place + 1 + 2 * number
        self._memory.floats[at], self._memory.floats[at + 1] = bucket


class SharedCounters:
    """Counter table of one worker; see :class:`ovmstrio.core.worker_peers.Counters`."""

    def __init__(self, state: SharedState, row: int, wakeups: WorkerWakeups) -> None:
        self._state = state
        self._row = row
        self._wakeups = wakeups
        self._rows: dict[str, SharedCounterRow] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Hold the inter-process lock within the block."""
        return self._state.locked()

    def row(self, name: str) -> SharedCounterRow:
        """Return the counter row of a name; raises NotSupported if the table is full."""
        known = self._rows.get(name)
        if known is None:
            with self._state.locked():
                known = self._rows[name] = SharedCounterRow(self._state.counters, counter_key(name), self._row)
        return known

    def notify(self, rows: tuple[int, ...]) -> None:
        """Wake other workers."""
        self._wakeups.notify(rows)

    async def wait(self) -> None:
        """Wait for a wake-up by another worker."""
        await self._wakeups.wait()


class ServiceLimit:
    """Concurrency limit of one service over all workers; see :class:`ovmstrio.core.limits.ConcurrencyLimit`."""

    def __init__(self, counters: SharedCounters, name: str, maximum: int) -> None:
        self._counters = counters
        self._counted = counters.row(f"project {name}")
        self.maximum = maximum

    def acquire(self) -> None:
        """Count a started request; raises TooManyRequests if the limit is reached."""
        with self._counters.locked():
            if self._counted.in_flight + self._counted.elsewhere().in_flight >= self.maximum:
                raise too_many_requests(self.maximum)
            self._counted.write(self._counted.in_flight + 1)

    def release(self) -> None:
        """Count a finished request."""
        with self._counters.locked():
            self._counted.write(self._counted.in_flight - 1)


# Retained metrics

_MOST_BYTES: Final = 8 * 2**20
"""Size limit of a text; longer ones are not saved."""
_TEXT_HEAD: Final = 2 * _CELL
_SLOT: Final = _CELL + _MOST_BYTES
_TEXT: Final = _TEXT_HEAD + 2 * _SLOT
_FORMATS: Final = 2


class RetainedMetrics:
    """Metrics of exited workers, so that sums never decrease; untouched pages take no memory.

    Each worker saves the metrics of its last scrape and, on a normal exit, its final ones.  The parent adds them to the
    retained metrics after the exit.

    ::

        text: active slot, generation │ length, bytes │ length, bytes   a text is complete whenever its writer dies

    The generation is odd while metrics are being added.
    """

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

    def save(self, row: int, text: bytes, *, is_open: bool) -> None:
        """Save the metrics of a worker."""
        if len(text) > _MOST_BYTES:
            return
        start = self._start(row, is_open=is_open)
        slot = 1 - self._number(start)
        at = start + _TEXT_HEAD + slot * _SLOT
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
                self.save(self._past, summed, is_open=is_open)
                self.save(row, b"", is_open=is_open)
                self._count_change(is_open=is_open)

    def generation(self, *, is_open: bool) -> int | None:
        """Return the generation of the retained metrics; None while they are updated."""
        number = self._number(self._start(self._past, is_open=is_open) + _CELL)
        return None if number % 2 else number

    def _count_change(self, *, is_open: bool) -> None:
        at = self._start(self._past, is_open=is_open) + _CELL
        self._set_number(at, self._number(at) + 1)

    def texts(self, rows: Iterable[int] = (), *, is_open: bool) -> list[bytes]:
        """Return the retained metrics, and saved ones of workers whose exit is not known yet."""
        texts = [self._text(row, is_open=is_open) for row in (*rows, self._past)]
        return list(filter(None, texts))

    def _text(self, row: int, *, is_open: bool) -> bytes:
        start = self._start(row, is_open=is_open)
        at = start + _TEXT_HEAD + self._number(start) * _SLOT
        return bytes(self._bytes[at + _CELL : at + _CELL + self._number(at)])

    def _start(self, row: int, *, is_open: bool) -> int:
        return (row * _FORMATS + is_open) * _TEXT

    def _number(self, at: int) -> int:
        return int.from_bytes(self._bytes[at : at + _CELL], "little")

    def _set_number(self, at: int, number: int) -> None:
        self._bytes[at : at + _CELL] = number.to_bytes(_CELL, "little")


# Shared state

_IN_FLIGHT, _CLOSED, _READY, _LAST_LIFE, _LAST_ID = range(5)
_CLEARED: Final = (_IN_FLIGHT, _CLOSED, _READY, _LAST_LIFE)
"""Columns of a worker, without that of its last sequence id, which its successor must not repeat."""
_COLUMNS: Final = 5
_DRAINING, _LOG_LEVEL, _REPLACED, _LOCK, _DEATHS, _SERVER_CELLS = range(6)
_STUCK_SECONDS: Final = 5.0
"""A worker whose event loop has shown no life for this time is stuck."""
_LOCK_SECONDS: Final = 0.05
"""Longest wait for the lock."""
_LOCK_TRIES: Final = 30
"""Tries without a pause; counts are changed in less time."""
_LOCK_PAUSE_SECONDS: Final = 0.0001
_TRY: Final = LOCK_EX | LOCK_NB


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
        self._server = rows * _COLUMNS
        start = _state_size(rows)
        self._cells = self._view[:start].cast("q")
        end = start + CounterTable.size(rows)
        self._lock = _SharedLock(descriptor, self._cells, self._server + _LOCK)
        self.counters = CounterTable(self._view[start:end], rows)
        self.metrics = RetainedMetrics(self._view[end:], rows)

    @classmethod
    def create(cls, rows: int) -> SharedState:
        """Create the shared memory in an anonymous file."""
        descriptor = os.memfd_create("ovmstrio-state", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _state_size(rows) + CounterTable.size(rows) + RetainedMetrics.size(rows))
        return cls(descriptor, rows)

    def close(self) -> None:
        """Release the memory."""
        self.counters.release()
        self.metrics.release()
        self._cells.release()
        self._view.release()
        self._memory.close()
        os.close(self.descriptor)

    def clear(self, row: int) -> None:
        """Clear the row of an exited worker, but not its metrics."""
        for column in _CLEARED:
            self._cells[row * _COLUMNS + column] = 0
        with self.locked():
            self.counters.clear(row)
        self.metrics.retain(row)

    def in_flight(self, row: int) -> int:
        """Return the running calls of a worker."""
        return self._cells[row * _COLUMNS + _IN_FLIGHT]

    def unanswered(self, row: int) -> int:
        """Return the running and queued calls of a worker."""
        return self.in_flight(row) + self.counters.waiting(row, counter_key(SERVER_COUNTER))

    def set_in_flight(self, row: int, count: int) -> None:
        """Set the number of running calls; called by the row's worker."""
        self._cells[row * _COLUMNS + _IN_FLIGHT] = count

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

    def last_id(self, row: int) -> int:
        """Return the last sequence id that a worker has generated, also before its restart."""
        return self._cells[row * _COLUMNS + _LAST_ID]

    def set_last_id(self, row: int, number: int) -> None:
        """Set the last generated sequence id; called by the row's worker."""
        self._cells[row * _COLUMNS + _LAST_ID] = number

    def set_draining(self) -> None:
        """Mark the server as draining, and thereby not ready."""
        self._cells[self._server + _DRAINING] = 1

    @property
    def is_draining(self) -> bool:
        """True if the server is draining."""
        return bool(self._cells[self._server + _DRAINING])

    def all_ready(self) -> bool:
        """Return whether every worker is ready."""
        return not self.is_draining and all(self.is_ready(row) or self.replaced == row for row in range(self.rows))

    @property
    def replaced(self) -> int:
        """Worker that is being replaced in a rolling restart; its readiness is ignored."""
        return self._cells[self._server + _REPLACED] - 1

    @replaced.setter
    def replaced(self, row: int) -> None:
        self._cells[self._server + _REPLACED] = row + 1

    @property
    def log_level(self) -> int:
        """Log level of all workers; 0 for the configured level."""
        return self._cells[self._server + _LOG_LEVEL]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self._cells[self._server + _LOG_LEVEL] = level

    @property
    def deaths(self) -> int:
        """Number of unexpected exits of workers."""
        return self._cells[self._server + _DEATHS]

    def add_death(self) -> None:
        """Count an unexpected exit; called by the parent."""
        self._cells[self._server + _DEATHS] += 1

    def locked(self) -> AbstractContextManager[None]:
        """Hold the inter-process lock within the block, which must not wait; see :class:`_SharedLock`."""
        return self._lock


class _SharedLock:
    """Lock of all processes that a stopped process cannot keep from the others; not reentrant.

    The lock is on one byte of a file, so that the end of a process releases it.  A process that has not released the
    byte within 50 ms counts as stopped, as by SIGSTOP, and all processes use the next byte from then on.  When the
    stopped process continues, it ends its change of its own row without the lock, so a limit may be exceeded by that
    one call.

    Args:
        cells: shared memory.
        at: cell that has the number of the byte.
    """

    __slots__ = ("_at", "_byte", "_cells", "_descriptor")

    def __init__(self, descriptor: int, cells: memoryview[int], at: int) -> None:
        self._descriptor = descriptor
        self._cells = cells
        self._at = at
        self._byte = 0

    def __enter__(self) -> None:
        tries, began = 0, 0.0
        while True:
            byte = self._byte = self._cells[self._at]
            try:
                lockf(self._descriptor, _TRY, 1, byte)
            except BlockingIOError:
                tries += 1
                if tries < _LOCK_TRIES:
                    continue
                began = began or time.perf_counter()
                if time.perf_counter() - began < _LOCK_SECONDS:
                    time.sleep(_LOCK_PAUSE_SECONDS)
                else:
                    tries, began = 0, 0.0
                    if self._cells[self._at] == byte:
                        self._cells[self._at] = byte + 1
            else:
                if self._cells[self._at] == byte:
                    return
                lockf(self._descriptor, LOCK_UN, 1, byte)

    def __exit__(self, *_: object) -> None:
        lockf(self._descriptor, LOCK_UN, 1, self._byte)


def _state_size(rows: int) -> int:
    return (rows * _COLUMNS + _SERVER_CELLS) * _CELL
