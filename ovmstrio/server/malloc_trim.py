"""What becomes of the memory that requests leave behind: kept for the next ones, and given back once none come."""

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

__all__ = ["KEPT_BYTES", "Growth", "give_back_freed_memory", "keep_freed_memory"]

log = structlog.get_logger(__name__)

KEPT_BYTES: Final = 128 * 2**20
_LARGEST_FROM_HEAP: Final = 32 * 2**20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_LOOK_SECONDS: Final = 2.0
_BUSY_SECONDS: Final = _LOOK_SECONDS / 10
_LONGEST_PAUSE_SECONDS: Final = 600.0
_WORTH_BYTES: Final = 8 * 2**20
_STILL_BYTES: Final = 2**20


def keep_freed_memory() -> bool:
    """Have the C library keep what this process lets go, up to ``KEPT_BYTES``; False where it knows no such thing.

    By itself, glibc gives the end of its heap back to the system whenever some megabytes are free, so that the tensors
    of each request are put into pages that the kernel has to find and clear anew.  It also has a heap for each few
    threads, each of which would keep as much, and never gives back the ends of those; hence there is one heap only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [
        mallopt(_M_ARENA_MAX, 1),
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
    ]
    return all(done)


class Growth:
    """Tells when memory is worth giving back: it has grown, or more of it lies unused, and it does not grow any more.

    What was in use when memory was given back last may be free by now, however large the process was then.

    A process with little to do gives back at once.  One that is busy may need it again: pauses between two times double
    as long as memory grows back within a few of them.

    Args:
        size: bytes that the process has now.
        now: the time, in seconds.
        unused: how many of them the C library has not lent to anybody.
    """

    __slots__ = ("_before", "_floor", "_last_at", "_pause", "_unused_floor")

    def __init__(self, size: int, now: float, unused: int = 0) -> None:
        self._floor = self._before = size
        self._unused_floor = unused
        self._last_at = now - _LONGEST_PAUSE_SECONDS
        self._pause = _LOOK_SECONDS

    def is_over(self, size: int, now: float, unused: int = 0, *, is_busy: bool) -> bool:
        """Look at the size, which is to be done at a steady pace; whether now is a time to give back."""
        rests = size <= self._before + _STILL_BYTES
        self._before = size
        self._floor, self._unused_floor = min(self._floor, size), min(self._unused_floor, unused)
        is_worth = size >= self._floor + _WORTH_BYTES or unused >= self._unused_floor + _WORTH_BYTES
        return rests and is_worth and not (is_busy and now < self._last_at + self._pause)

    def expect(self) -> None:
        """Give back at the next time that memory rests, whether it has grown or not: something large may be gone."""
        self._floor = 0

    def given_back(self, size: int, now: float, unused: int = 0, *, is_busy: bool) -> None:
        """Note that memory was given back, and how much there is now."""
        soon = is_busy and now < self._last_at + 4 * self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS) if soon else _LOOK_SECONDS
        self._last_at = now
        self._floor = self._before = size
        self._unused_floor = unused


async def give_back_freed_memory(
    wait_change: Callable[[], Awaitable[object]],
    resident: Callable[[], int] | None = None,
    trim: Callable[[], object] | None = None,
    worked: Callable[[], float] = time.process_time,
    lent: Callable[[], int] | None = None,
) -> None:
    """Give memory back to the system when requests have left much of it and come no more, for ever.

    Returns at once where that is not possible.

    Args:
        wait_change: returns when what is served has changed, so that something may have been unloaded.
        resident: tells the bytes that the process has; by default those that the system says.
        trim: gives back what is free; runs in a thread, by default the C library's.
        worked: tells the seconds for which the process has worked.
        lent: tells the bytes that the C library has lent to the process, 0 if it does not say.

    Cancellation: at any time; a thread that is giving back is waited for, which takes milliseconds.
    """
    resident, trim = resident or resident_bytes, trim or _malloc_trim()
    if trim is None or not resident():
        return
    lent = lent or _lent_bytes()
    size = resident()
    growth, before = Growth(size, trio.current_time(), _unused(size, lent)), worked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect_after, wait_change, growth)
        while True:
            await trio.sleep(_LOOK_SECONDS)
            now, size, work = trio.current_time(), resident(), worked()
            is_busy, before = work - before > _BUSY_SECONDS, work
            if growth.is_over(size, now, _unused(size, lent), is_busy=is_busy):
                await trio.to_thread.run_sync(_give_back, trim)
                left = resident()
                growth.given_back(left, now, _unused(left, lent), is_busy=is_busy)
                log.debug("gave memory back", before=size, after=left)


async def _expect_after(wait_change: Callable[[], Awaitable[object]], growth: Growth) -> None:
    while True:
        await wait_change()
        growth.expect()


def _give_back(trim: Callable[[], object]) -> None:
    # Errors keep the frames that they went through, and those keep the requests, until cycles are looked for.
    gc.collect()
    trim()


def _malloc_trim() -> Callable[[], object] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else partial(trim, 0)


_COUNTS: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's ``malloc.h``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _COUNTS)


def _lent_bytes() -> Callable[[], int]:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return lambda: 0
    mallinfo.restype = _Mallinfo

    def lent() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return lent


def _unused(size: int, lent: Callable[[], int]) -> int:
    """Tell how much of what the process has was not lent: free memory, and what never was the C library's."""
    return max(0, size - in_use) if (in_use := lent()) else 0
