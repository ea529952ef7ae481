"""Memory of finished requests: kept by malloc for the next requests, and returned to the system when idle."""

from __future__ import annotations

import ctypes
import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.telemetry.process_metrics import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger(__name__)

KEPT_BYTES: Final = 128 * 2**20
_MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_POLL_SECONDS: Final = 2.0
_BUSY_SECONDS: Final = _POLL_SECONDS / 10
_MAX_PAUSE_SECONDS: Final = 600.0
_MIN_TRIM_BYTES: Final = 8 * 2**20
_STABLE_BYTES: Final = 2**20


def configure_malloc() -> bool:
    """Configure malloc to keep up to ``KEPT_BYTES`` of freed memory; return False if unsupported.

    By default glibc returns the top of its heap after a few free megabytes, so that every request's tensors need new
    zeroed
    pages.  One arena only, as each arena would keep as much and never returns inner pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [
        mallopt(_M_ARENA_MAX, 1),
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
    ]
    return all(done)


class TrimPolicy:
    """Decides when to trim: memory has grown, or more of it is unused, and it does not grow any more.

    A process with little to do trims at once.  A busy process may need the memory again: the pause between trims
    doubles
    while memory grows back within a few pauses.

    Args:
        unused: free bytes within malloc.
    """

    __slots__ = ("_before", "_floor", "_last_at", "_pause", "_unused_floor")

    def __init__(self, size: int, now: float, unused: int = 0) -> None:
        self._floor = self._before = size
        self._unused_floor = unused
        self._last_at = now - _MAX_PAUSE_SECONDS
        self._pause = _POLL_SECONDS

    def is_over(self, size: int, now: float, unused: int = 0, *, is_busy: bool) -> bool:
        """Record the size, at regular intervals, and return whether to trim now."""
        rests = size <= self._before + _STABLE_BYTES
        self._before = size
        self._floor, self._unused_floor = min(self._floor, size), min(self._unused_floor, unused)
        is_worth = size >= self._floor + _MIN_TRIM_BYTES or unused >= self._unused_floor + _MIN_TRIM_BYTES
        return rests and is_worth and not (is_busy and now < self._last_at + self._pause)

    def expect(self) -> None:
        """Trim when memory stops growing, regardless of its size: something large may have been freed."""
        self._floor = 0

    def record_trim(self, size: int, now: float, unused: int = 0, *, is_busy: bool) -> None:
        """Record a trim and the size after it."""
        soon = is_busy and now < self._last_at + 4 * self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS) if soon else _POLL_SECONDS
        self._last_at = now
        self._floor = self._before = size
        self._unused_floor = unused


async def trim_freed_memory(
    wait_change: Callable[[], Awaitable[object]],
    resident: Callable[[], int] | None = None,
    trim: Callable[[], object] | None = None,
    worked: Callable[[], float] = time.process_time,
    lent: Callable[[], int] | None = None,
) -> None:
    """Trim freed memory when requests stop; runs until cancelled, or returns at once if unsupported.

    Args:
        wait_change: returns after services were changed, as models may have been unloaded.
        resident: returns the resident bytes.
        trim: trims, in a thread; by default glibc's ``malloc_trim``.
        worked: returns the CPU seconds of the process.
        lent: returns the bytes allocated from malloc, 0 if unknown.
    """
    resident, trim = resident or resident_bytes, trim or _malloc_trim()
    if trim is None or not resident():
        return
    lent = lent or _allocated_bytes()
    size = resident()
    growth, before = TrimPolicy(size, trio.current_time(), _unused(size, lent)), worked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect_on_change, wait_change, growth)
        while True:
            await trio.sleep(_POLL_SECONDS)
            now, size, work = trio.current_time(), resident(), worked()
            is_busy, before = work - before > _BUSY_SECONDS, work
            if growth.is_over(size, now, _unused(size, lent), is_busy=is_busy):
                await trio.to_thread.run_sync(_collect_and_trim, trim)
                left = resident()
                growth.record_trim(left, now, _unused(left, lent), is_busy=is_busy)
                log.debug("freed memory trimmed", before=size, after=left)


async def _expect_on_change(wait_change: Callable[[], Awaitable[object]], growth: TrimPolicy) -> None:
    while True:
        await wait_change()
        growth.expect()


def _collect_and_trim(trim: Callable[[], object]) -> None:
    # Exceptions keep their frames and thereby requests alive until the cyclic collector runs.
    gc.collect()
    trim()


def _malloc_trim() -> Callable[[], object] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else partial(trim, 0)


_MALLINFO_FIELDS: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's ``malloc.h``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


def _allocated_bytes() -> Callable[[], int]:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return lambda: 0
    mallinfo.restype = _Mallinfo

    def lent() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return lent


def _unused(size: int, lent: Callable[[], int]) -> int:
    """Return the resident bytes that are not allocated, including those outside of malloc."""
    return max(0, size - in_use) if (in_use := lent()) else 0
