"""Placement of blocking work: on the event loop, in OpenVINO's threads, or in a worker thread.

An inference outside the event loop costs the loop about 30 µs of CPU and adds 75 to 280 µs of latency, however short it
is.  An inline inference blocks the loop while it runs.  So an inference runs inline only if its measured time is below
the latency that leaving would add, or, on a busy loop, below the CPU time that leaving would cost the loop.
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
"""Inferences that are expected to be shorter run inline."""
FEW_CORES_THRESHOLD_SECONDS: Final = 500e-6
"""Inline threshold on few cores, for inferences that run in the calling thread.

Up to about this time leaving the event loop costs as much as it saves there.
"""
FILLING_THRESHOLD_SECONDS: Final = 1e-3
"""Inline threshold on few cores, for inferences that use all cores and so run one after the other anyway.

Leaving the event loop costs about 300 µs of CPU there, partly taken from inferences (benchmarks/RESULTS.md).
"""

_STEP: Final = 1.03
_RANGE: Final = 8
_LEAVE_FACTOR: Final = 1.25
_RETURN_FACTOR: Final = 0.8
_PROBE_FACTOR: Final = 3
_PROBE_INTERVAL: Final = 128

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


@dataclass(slots=True)
class _SizeClass:
    """Measurements of inferences with inputs of about one size; ``seconds`` is about their median."""

    seconds: float
    inline: bool
    away_count: int = 0


class Placement:
    """Decision whether a request of one model runs inline, from its input size and recent inference times.

    Args:
        inline_bytes: the maximum input size of inline inferences until their times are known; -1 for no inline
            inferences.
        one_size: all inputs have the same size.
        learns: measured times change the decision.
        most: the inline threshold in seconds on an idle event loop.
        limit: a constant threshold in seconds; None for a threshold that depends on the load of the event loop.

    Attributes:
        inline_bytes: as the argument.
        limit: as the argument.
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
        self._sizes: dict[int, _SizeClass] = {}

    @classmethod
    def away(cls) -> Placement:
        """Create a placement without inline inferences."""
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
        """Create a placement from one measured time of an inference on ``input_bytes``.

        ``limit``, or else ``most``, is the inline threshold in seconds.  Without a fixed shape, time is assumed to be
        proportional to the input size.
        """
        inline_bytes, most = -1.0, limit or most
        if seconds < most:
            inline_bytes = math.inf if fixed_shape else max(input_bytes, 1) * most / seconds
        return cls(inline_bytes, one_size=fixed_shape, learns=True, most=most, limit=limit)

    def is_inline(self, input_bytes: int) -> bool:
        """Return whether a request with ``input_bytes`` of input runs inline.

        Of sizes up to 3 times slower than the threshold, one of 128 requests runs inline to measure the time again.
        """
        known = self._sizes.get(0 if self._one_size else input_bytes.bit_length())
        if known is None:
            return input_bytes <= self.inline_bytes
        if known.inline or known.seconds > _PROBE_FACTOR * self._most:
            return known.inline
        known.away_count += 1
        return known.away_count % _PROBE_INTERVAL == 0

    def learn(
        self, input_bytes: int, seconds: float, limit: float = INLINE_THRESHOLD_SECONDS, *, on_loop: bool = False
    ) -> bool:
        """Record the time of an inference; return whether the decision for its size changed.

        ``limit`` is the current threshold, unless the placement has a constant one.  One short inline run makes a size
        inline again.  Otherwise the decision changes only after times well above or below the threshold.
        """
        if not self._learns:
            return False
        limit = self.limit or limit
        size = 0 if self._one_size else input_bytes.bit_length()
        known = self._sizes.get(size)
        if known is None:
            inline = input_bytes <= self.inline_bytes
            known = self._sizes[size] = _SizeClass(limit / 2 if inline else 2 * limit, inline)
        # Constant steps converge to the median, so that a few long times on a shared machine have no effect.
        step = _STEP if seconds > known.seconds else 1 / _STEP
        known.seconds = min(max(known.seconds * step, limit / _RANGE), limit * _RANGE)
        if on_loop and not known.inline and seconds < limit * _RETURN_FACTOR:
            known.seconds = limit / 2
        if known.inline == (known.seconds < limit * (_LEAVE_FACTOR if known.inline else _RETURN_FACTOR)):
            return False
        known.inline = not known.inline
        return True


async def run_load(work: Callable[[], _T]) -> _T:
    """Load or compile a model in a worker thread; the number of concurrent loads is limited.

    Raises:
        Whatever ``work`` raises.

    Cancellation: at once; the thread continues and its result is dropped, so ``work`` must own all that it uses.
    """
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=load_limiter())
