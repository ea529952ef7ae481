"""Where blocking work runs: on the event loop, in the runtime's own threads, or in a worker thread.

An inference that leaves the event loop costs it about 30 µs of CPU more and comes back 75 to 280 µs later, however
short it was.  One that stays blocks everything else while it runs.  So an inference stays only when its measured
time is below what leaving would add to its own latency, or, where the loop has no time to spare, to the loop's work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

_T = TypeVar("_T")

INLINE_THRESHOLD_SECONDS: Final = 200e-6
"""Inferences expected to be shorter run on the event loop."""
FEW_CORES_THRESHOLD_SECONDS: Final = 500e-6
"""The same on few cores, of inferences that are the work of the thread that asks for them.

Leaving takes as much there as it saves, up to about such a time.
"""
FILLING_THRESHOLD_SECONDS: Final = 1e-3
"""The same of inferences that fill all of few cores, so that one runs after the other wherever they are.

One that leaves takes some 300 µs of processors more there, from the inferences as well (benchmarks/RESULTS.md).
"""

_STEP: Final = 1.03
_RANGE: Final = 8
_LEAVES_AT: Final = 1.25
_RETURNS_AT: Final = 0.8
_NEARLY: Final = 3
_PROBE_EVERY: Final = 128

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


@dataclass(slots=True)
class _Size:
    """What is known of inferences on inputs of about one size; ``seconds`` is about their median."""

    seconds: float
    inline: bool
    asked: int = 0


class Placement:
    """Decides for each request of one model, by the size of its inputs and the times that inferences took lately.

    Args:
        inline_bytes: requests with at most so many bytes of input run on the event loop, until their times are known;
            -1 sends all away.
        one_size: all inputs have the same size.
        learns: whether times change anything.
        most: what is short enough, in seconds, where the loop has time to spare.
        limit: the same however busy the loop is; the loop's load says that without it.

    Attributes:
        limit: as given.
    """

    __slots__ = ("_learns", "_most", "_one_size", "_sizes", "inline_bytes", "limit")

    def __init__(
        self,
        inline_bytes: float,
        *,
        one_size: bool = False,
        learns: bool = False,
        most: float = INLINE_THRESHOLD_SECONDS,
        limit: float | None = None,
    ) -> None:
        self.limit = limit
        self._most = limit or most
        self.inline_bytes = inline_bytes
        self._one_size = one_size
        self._learns = learns
        self._sizes: dict[int, _Size] = {}

    @classmethod
    def away(cls) -> Placement:
        """Let no request run on the event loop, ever."""
        return cls(-1)

    @classmethod
    def measured(
        cls,
        seconds: float,
        input_bytes: int,
        *,
        fixed_shape: bool,
        most: float = INLINE_THRESHOLD_SECONDS,
        limit: float | None = None,
    ) -> Placement:
        """Begin with one measured time of an inference on ``input_bytes``, ``limit`` or ``most`` being short enough.

        Where shapes may grow, time is taken to grow with the bytes of input.
        """
        inline_bytes, most = -1.0, limit or most
        if seconds < most:
            inline_bytes = math.inf if fixed_shape else max(input_bytes, 1) * most / seconds
        return cls(inline_bytes, one_size=fixed_shape, learns=True, most=most, limit=limit)

    def is_inline(self, input_bytes: int) -> bool:
        """Tell whether a request with so many bytes of input runs on the event loop.

        Once in a while one of a size that is nearly short enough does, to see whether that still holds.
        """
        known = self._sizes.get(0 if self._one_size else input_bytes.bit_length())
        if known is None:
            return input_bytes <= self.inline_bytes
        if known.inline or known.seconds > _NEARLY * self._most:
            return known.inline
        known.asked += 1
        return known.asked % _PROBE_EVERY == 0

    def learn(
        self, input_bytes: int, seconds: float, limit: float = INLINE_THRESHOLD_SECONDS, *, on_loop: bool = False
    ) -> bool:
        """Take in how long an inference took; gives whether requests of its size change places.

        ``limit`` is what is short enough now, unless it is always the same.  One short run on the loop brings a size
        back there; else only times that stay well beyond it, or well below, change anything.
        """
        if not self._learns:
            return False
        limit = self.limit or limit
        size = 0 if self._one_size else input_bytes.bit_length()
        known = self._sizes.get(size)
        if known is None:
            inline = input_bytes <= self.inline_bytes
            known = self._sizes[size] = _Size(limit / 2 if inline else 2 * limit, inline)
        # This comes to the median: a few long times, of a machine that others use, are no news of the model.
        step = _STEP if seconds > known.seconds else 1 / _STEP
        known.seconds = min(max(known.seconds * step, limit / _RANGE), limit * _RANGE)
        if on_loop and not known.inline and seconds < limit * _RETURNS_AT:
            known.seconds = limit / 2
        if known.inline == (known.seconds < limit * (_LEAVES_AT if known.inline else _RETURNS_AT)):
            return False
        known.inline = not known.inline
        return True


async def run_load(work: Callable[[], _T]) -> _T:
    """Run the reading or compiling of a model in a worker thread, few at a time.

    Raises:
        Whatever ``work`` raises.

    Cancellation: at once; the thread goes on and its result is dropped, so ``work`` must own all that it touches.
    """
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=load_limiter())
