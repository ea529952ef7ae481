"""Threads in which storages are read for those who ask for models; nobody else's code runs there.

::

    a thread of the handler ──(its place is lent)──> queue ──> storage thread ──> the copy

A few threads fetch for all.  Whoever waits stops waiting when nothing has come for some time: then the attempt fails,
though the storage may keep the thread, and what comes of it later is removed.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextvars import copy_context
from typing import Final

import trio

from ovmstrio.core.errors import Overloaded, StorageFailure
from ovmstrio.runtimes.handlers.models.sources import Copy, CopyMaker
from ovmstrio.runtimes.handlers.models.tree import ModelKey, VersionFiles
from ovmstrio.work.threads.lending import lent_place

__all__ = ["MAX_WAITING", "StorageThreads"]

MAX_WAITING: Final = 64
"""How many calls may wait for storages; each of them has a thread."""


class _Fetch:
    """One version that is to be copied.

    Attributes:
        moved: when a piece of it has come, or it has begun; in seconds as ``time.monotonic``.
    """

    __slots__ = ("context", "future", "is_begun", "key", "moved", "version")

    def __init__(self, key: ModelKey, version: VersionFiles) -> None:
        self.key = key
        self.version = version
        # What is asked of the storage is a part of the call that asked first.
        self.context = copy_context()
        self.future: Future[Copy] = Future()
        self.is_begun = False
        self.moved = time.monotonic()

    def note(self) -> None:
        """Note that something has come."""
        self.moved = time.monotonic()


class StorageThreads:
    """Fetches versions of models for callers that block, from any thread, the event loop's too.

    Args:
        maker: makes copies.
        count: how many are made at once.
        stall_seconds: how long a storage may give nothing.
    """

    def __init__(self, maker: CopyMaker, count: int, stall_seconds: float) -> None:
        self._maker = maker
        self._count = count
        self._stall_seconds = stall_seconds
        self._queue: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._open: set[_Fetch] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self) -> None:
        """Host the threads until cancelled.

        Ownership: the threads; one that a storage keeps is left to it.

        Cancellation: at once; whoever waits is told so.
        """
        limiter = trio.CapacityLimiter(math.inf)
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self._count):
                    nursery.start_soon(self._host, limiter)
        finally:
            self._close()

    async def _host(self, limiter: trio.CapacityLimiter) -> None:
        await trio.to_thread.run_sync(self._work, abandon_on_cancel=True, limiter=limiter)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            for fetch in self._open:
                _settle(fetch, StorageFailure("the models are about to be closed"))
        for _ in range(self._count):
            self._queue.put(None)

    def fetch(self, key: ModelKey, version: VersionFiles) -> Copy:
        """Copy a version, and give the copy; the place of the calling thread is lent meanwhile.

        Raises:
            StorageFailure: it cannot be read or kept, or nothing came of it for ``stall_seconds``.
            Overloaded: too many wait.
        """
        fetch = _Fetch(key, version)
        with self._lock:
            if self._is_closed:
                raise StorageFailure("the models are about to be closed")
            if len(self._open) >= MAX_WAITING:
                raise Overloaded(
                    f"{key} cannot be fetched now: {MAX_WAITING} calls wait for models of storages already"
                )
            self._open.add(fetch)
        try:
            self._queue.put(fetch)
            with lent_place():
                return self._wait(fetch)
        finally:
            with self._lock:
                self._open.discard(fetch)

    def _wait(self, fetch: _Fetch) -> Copy:
        while True:
            seconds = self._moved(fetch) + self._stall_seconds - time.monotonic()
            try:
                return fetch.future.result(max(seconds, 0))
            except TimeoutError:
                if fetch.future.done() or self._moved(fetch) + self._stall_seconds > time.monotonic():
                    continue
                what = "nothing came from its storage" if fetch.is_begun else "the storage threads stood still"
                _settle(fetch, StorageFailure(f"{fetch.key}: {what} for {self._stall_seconds:g} s"))

    def _moved(self, fetch: _Fetch) -> float:
        """Tell when it last went on, or, while it waits for a thread, when any of them did."""
        if fetch.is_begun:
            return fetch.moved
        with self._lock:
            return max([fetch.moved, *(each.moved for each in self._open if each.is_begun)])

    # In the threads

    def _work(self) -> None:
        while (fetch := self._queue.get()) is not None:
            if not fetch.future.done():
                self._make(fetch)
            del fetch

    def _make(self, fetch: _Fetch) -> None:
        fetch.note()
        fetch.is_begun = True
        try:
            copy = fetch.context.run(self._maker.make, fetch.key, fetch.version, fetch.note)
        except BaseException as error:  # noqa: BLE001 - for whoever waits
            _settle(fetch, error)
            return
        if not _settle(fetch, copy):
            self._maker.remove(copy)


def _settle(fetch: _Fetch, outcome: Copy | BaseException) -> bool:
    """Give an outcome to whoever waits; False if it has one."""
    try:
        if isinstance(outcome, BaseException):
            fetch.future.set_exception(outcome)
        else:
            fetch.future.set_result(outcome)
    except InvalidStateError:
        return False
    return True
