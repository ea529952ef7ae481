"""Which threads of a pool may run calls, and how one that only waits lends its place to another.

A call that waits for something that is nobody's code, such as a storage, lends its place to another meanwhile, and has
it back before it goes on: a free one, that of a thread that is idle, or that of the first that ends its call, which
then leaves the pool.  No more calls than there are places run code of users at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["Places", "PoolThread", "lent_place", "running_as"]


class PoolThread:
    """One thread of a pool.

    Args:
        places: of its pool.

    Attributes:
        is_abandoned: whether nobody waits any more for what it does.
        has_place: whether it counts among those that may run calls.
        is_lent: whether it waits for something else, and another may have its place.
        gate: opens when it has its place back; None while it does not wait for that.
    """

    __slots__ = ("gate", "has_place", "is_abandoned", "is_lent", "places")

    def __init__(self, places: Places) -> None:
        self.places = places
        self.is_abandoned = False
        self.has_place = False
        self.is_lent = False
        self.gate: threading.Semaphore | None = None


class Places:
    """The places of one pool; given and taken in threads, too, as the event loop may be what waits for one of them.

    Args:
        limit: how many there are.
        look: has a thread that is idle look whether somebody wants a place back; from any thread.
        lent: is told that a place has been lent; from any thread.

    Attributes:
        stuck: threads that were given up and still run.
    """

    def __init__(self, limit: int, look: Callable[[], None], lent: Callable[[], None]) -> None:
        self.stuck = 0
        self._limit = limit
        self._look = look
        self._tell_lent = lent
        self._lock = threading.Lock()
        self._taken = 0
        self._starting = 0
        self._lent = 0
        self._returning: deque[PoolThread] = deque()
        self._is_over = False

    @property
    def taken(self) -> int:
        """How many places have threads that may run calls, or are about to."""
        return self._taken + self._starting

    @property
    def lent(self) -> int:
        """How many threads wait for something else."""
        return self._lent

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants a place back."""
        return bool(self._returning)

    def reserve(self, calls: int) -> bool:
        """Keep a place for another thread, if so many calls, with those that wait, need one and it may be started."""
        # Seldom any is, and whatever frees a place asks again.
        if calls <= self._taken + self._starting:
            return False
        with self._lock:
            there = self._taken + self._starting
            is_needed = calls - self._lent - len(self._returning) > there
            if not is_needed or there >= self._limit or there + self.stuck >= 2 * self._limit:
                return False
            self._starting += 1
            return True

    def begin(self, thread: PoolThread) -> None:
        """Take the place that was kept, unless somebody has got it back meanwhile; called in the thread."""
        with self._lock:
            self._starting -= 1
            if self._taken < self._limit:
                self._admit(thread)

    def end(self, thread: PoolThread) -> None:
        """Free the place of a thread that has ended."""
        with self._lock:
            if thread.is_abandoned:
                self.stuck -= 1
            elif thread.has_place:
                self._free(thread)

    def give_up(self, thread: PoolThread) -> None:
        """Count a thread as stuck, wherever it is; it needs no place any more."""
        with self._lock:
            thread.is_abandoned = True
            self.stuck += 1
            if thread.has_place:
                self._free(thread)
            elif thread.is_lent:
                self._lent -= 1
            elif thread.gate is not None:
                self._returning.remove(thread)
                thread.gate.release()

    def close(self) -> int:
        """Give places to all who want one; tells how many threads there are then."""
        with self._lock:
            self._is_over = True
            while self._returning:
                self._admit(self._returning.popleft())
            return self._taken + self._starting + self._lent + self.stuck

    # In the threads

    def lend(self, thread: PoolThread) -> None:
        """Let others have the place of a thread until :meth:`take_back`."""
        with self._lock:
            thread.is_lent = True
            if thread.is_abandoned:
                return
            self._lent += 1
            self._free(thread)
        self._tell_lent()

    def take_back(self, thread: PoolThread) -> None:
        """Wait until a thread has a place again, unless it was given up."""
        with self._lock:
            thread.is_lent = False
            if thread.is_abandoned:
                return
            self._lent -= 1
            if self._is_over or self._taken < self._limit:
                self._admit(thread)
                return
            gate = thread.gate = threading.Semaphore(0)
            self._returning.append(thread)
        self._look()
        gate.acquire()

    def hand_over(self, thread: PoolThread) -> None:
        """Give the place of a thread that has ended its call to the first that wants one back."""
        with self._lock:
            if self._returning and thread.has_place:
                self._free(thread)

    def _free(self, thread: PoolThread) -> None:
        thread.has_place = False
        self._taken -= 1
        if self._returning:
            self._admit(self._returning.popleft())

    def _admit(self, thread: PoolThread) -> None:
        thread.has_place = True
        self._taken += 1
        if thread.gate is not None:
            thread.gate.release()
            thread.gate = None


class _Here(threading.local):
    """Which thread of a pool this is, None for all others."""

    thread: PoolThread | None = None


_here: Final = _Here()


@contextmanager
def running_as(thread: PoolThread) -> Iterator[None]:
    """Be a thread of a pool within the block."""
    _here.thread = thread
    try:
        yield
    finally:
        _here.thread = None


@contextmanager
def lent_place() -> Iterator[None]:
    """Lend this thread's place to other calls of its pool while the block waits; in other threads do nothing.

    Whoever lends sees to it that not too many do, as each of them keeps its thread.  No lock may be held when the block
    ends that another call waits for in its place, for the end waits for a place.
    """
    thread = _here.thread
    if thread is None or thread.is_lent:
        yield
        return
    thread.places.lend(thread)
    try:
        yield
    finally:
        thread.places.take_back(thread)
