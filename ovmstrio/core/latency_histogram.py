"""Times counted in bands, of which percentiles can be told without keeping the times themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TIME_BOUNDS", "no_times", "time_quantile"]

TIME_BOUNDS: Final = tuple(10 ** (step / 6 - 5) for step in range(43))
"""Seconds up to which calls are counted together: six bounds a decade, from ten microseconds to a hundred seconds."""


def no_times() -> list[int]:
    """Give how many there are in each band before any: one up to each bound, and one beyond them all."""
    return [0] * (len(TIME_BOUNDS) + 1)


def time_quantile(times: Sequence[int], part: float) -> float | None:
    """Tell in how many seconds a part of the calls ended that ``times`` count; None if there are none.

    Between two bounds calls are taken to be spread evenly; beyond the last one that bound is what is known.
    """
    rank, below = part * sum(times), 0
    if not rank:
        return None
    for index, number in enumerate(times):
        if number and below + number >= rank:
            if index == len(TIME_BOUNDS):
                break
            lower = TIME_BOUNDS[index - 1] if index else 0.0
            return lower + (TIME_BOUNDS[index] - lower) * (rank - below) / number
        below += number
    return TIME_BOUNDS[-1]
