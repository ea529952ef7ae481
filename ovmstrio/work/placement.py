"""Where blocking work runs: on the event loop, in the runtime's own threads, or in a worker thread.

An inference that leaves the event loop costs it about 30 µs of CPU more and comes back 75 to 280 µs later, however
short it was.  One that stays blocks everything else while it runs.  So an inference stays only when its measured
time is below what leaving would add to its own latency.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

__all__ = ["INLINE_THRESHOLD_SECONDS", "LOADS_AT_ONCE", "Placement", "load_limiter", "run_load"]

_T = TypeVar("_T")

INLINE_THRESHOLD_SECONDS: Final = 200e-6
"""Inferences expected to be shorter run on the event loop."""

LOADS_AT_ONCE: Final = min(max(2, len(os.sched_getaffinity(0))), 8)
"""A model is read and compiled on one core for the most part, and needs twice its memory meanwhile."""

_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("load limiter")


def load_limiter() -> trio.CapacityLimiter:
    """Give the limiter of this run's loads; a run that ends before an abandoned load would keep its token for ever."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
        _limiter.set(limiter)
        return limiter


@dataclass(frozen=True, slots=True)
class Placement:
    """Decides for each request of one model, by the size of its inputs.

    Attributes:
        inline_bytes: requests with at most so many bytes of input run on the event loop; -1 sends all away.
    """

    inline_bytes: float

    @classmethod
    def away(cls) -> Placement:
        """Let no request run on the event loop."""
        return cls(-1)

    @classmethod
    def measured(cls, seconds: float, input_bytes: int, *, fixed_shape: bool) -> Placement:
        """Decide by one measured time of an inference on ``input_bytes``.

        Where shapes may grow, time is taken to grow with the bytes of input.
        """
        if seconds >= INLINE_THRESHOLD_SECONDS:
            return cls.away()
        if fixed_shape:
            return cls(float("inf"))
        return cls(max(input_bytes, 1) * INLINE_THRESHOLD_SECONDS / seconds)

    def is_inline(self, input_bytes: int) -> bool:
        """Tell whether a request with so many bytes of input runs on the event loop."""
        return input_bytes <= self.inline_bytes


async def run_load(work: Callable[[], _T]) -> _T:
    """Run the reading or compiling of a model in a worker thread, few at a time.

    Raises:
        Whatever ``work`` raises.

    Cancellation: at once; the thread goes on and its result is dropped, so ``work`` must own all that it touches.
    """
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=load_limiter())
