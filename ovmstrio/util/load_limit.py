"""Limit of concurrent model loads, which run in worker threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

import trio

_T = TypeVar("_T")

LOADS_AT_ONCE: Final = min(max(2, len(os.sched_getaffinity(0))), 8)
"""Concurrent model loads.  A load uses mostly one core, and twice the memory of its model."""

_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("load limiter")


def load_limiter() -> trio.CapacityLimiter:
    """Return the limiter of model loads in this trio run."""
    # One limiter for all runs would lose the token of a load that outlives its run.
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
        _limiter.set(limiter)
        return limiter


async def run_load(work: Callable[[], _T]) -> _T:
    """Load or compile a model in a worker thread; the number of concurrent loads is limited.

    Raises:
        Whatever ``work`` raises.

    Cancellation: at once; the thread continues and its result is dropped, so ``work`` must own all that it uses.
    """
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=load_limiter())
