"""Latency histogram with logarithmic buckets and quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

HISTOGRAM_BOUNDS: Final = tuple(10 ** (step / 6 - 5) for step in range(43))
"""Upper bounds in seconds: six per decade, from 10 us to 100 s."""


def empty_histogram() -> list[int]:
    """Return empty counts: one bucket per bound and one above."""
    return [0] * (len(HISTOGRAM_BOUNDS) + 1)


def histogram_quantile(times: Sequence[int], part: float) -> float | None:
    """Return the quantile ``part`` in seconds, interpolated within its bucket; None without data.

    Above the last bound the result is that bound.
    """
    rank, below = part * sum(times), 0
    if not rank:
        return None
    for index, number in enumerate(times):
        if number and below + number >= rank:
            if index == len(HISTOGRAM_BOUNDS):
                break
            lower = HISTOGRAM_BOUNDS[index - 1] if index else 0.0
            return lower + (HISTOGRAM_BOUNDS[index] - lower) * (rank - below) / number
        below += number
    return HISTOGRAM_BOUNDS[-1]
