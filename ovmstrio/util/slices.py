"""Long computations in short slices, so that the event loop runs between two slices.

A computation is a generator that yields between its slices. A slice holds the GIL for a few milliseconds at most. The
slices run in a worker thread, and one computation of a trio run makes progress at a time.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Final, TypeVar

import trio

T = TypeVar("T")

SLICE_BYTES: Final = 128 * 1024
"""Input bytes of one slice."""
_TURN_SECONDS: Final = 0.02
"""Time after which the next computation gets the thread."""
_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("slices")


async def run_in_slices(computation: Generator[None, None, T]) -> T:
    """Run a computation in a worker thread and return its result.

    Computations that run at the same time take turns in the order of their arrival.

    Raises:
        Exception: any exception of the computation.

    Cancellation: between two turns; the computation is closed then.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    results: list[T] = []
    try:
        while not await trio.to_thread.run_sync(_run_turn, computation, results, limiter=limiter):
            pass
    finally:
        computation.close()
    return results.pop()


def run_to_end(computation: Generator[None, None, T]) -> T:
    """Run a computation in this thread and return its result.

    Raises:
        Exception: any exception of the computation.
    """
    while True:
        try:
            next(computation)
        except StopIteration as end:
            result: T = end.value
            return result


def _run_turn(computation: Generator[None, None, T], results: list[T]) -> bool:
    """Run slices for one turn; return True after the last one."""
    until = perf_counter() + _TURN_SECONDS
    while perf_counter() < until:
        try:
            next(computation)
        except StopIteration as end:
            results.append(end.value)
            return True
    return False
