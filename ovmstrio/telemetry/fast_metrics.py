"""Counters and histograms that cost a call next to nothing; the library's own take a lock for each number.

They are counted by the event loop alone, and read by whichever thread answers a scraper.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from time import time
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.metric_families import Family

__all__ = ["Count", "Counts", "Spread", "Spreads"]


class Count:
    """How often something has happened."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def inc(self, amount: int = 1) -> None:
        """Count it once more, or so many times."""
        self.number += amount


class Spread:
    """How values are spread over buckets, whose upper bounds belong to them.

    Attributes:
        numbers: how many values are in each bucket.
        total: all values together.
        traced: for a bucket the last value in it that belongs to a trace, None while there is none in any.
    """

    __slots__ = ("_bounds", "numbers", "total", "traced")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.numbers = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.traced: dict[int, Exemplar] | None = None

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count a value in, which is of a trace or of none."""
        bucket = bisect_left(self._bounds, value)
        self.numbers[bucket] += 1
        self.total += value
        if trace_id:
            if self.traced is None:
                self.traced = {}
            self.traced[bucket] = Exemplar({"trace_id": trace_id}, value, time())

    def buckets(self, names: Sequence[str]) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Give each bucket by its name, how many values there are up to its bound, and the traced one in it, if any."""
        given: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        given += zip(names, accumulate(map(float, self.numbers)), strict=True)
        for bucket, exemplar in tuple((self.traced or {}).items()):
            given[bucket] = (given[bucket][0], given[bucket][1], exemplar)
        return given


class Counts:
    """A family of counters, as a collector."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Count] = {}

    def labels(self, *values: str) -> Count:
        """Give the counter with these labels, made at zero on first sight."""
        return self._children.get(values) or self._children.setdefault(values, Count())

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Tell the family's name, for which it answers."""
        return (self._empty(),)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Give what was counted."""
        collected = self._empty()
        for values, child in tuple(self._children.items()):
            collected.add_metric(values, child.number)
        return (collected,)

    def _empty(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._family.name, self._family.help, labels=self._family.labels)


class Spreads:
    """A family of histograms, as a collector."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Spread] = {}
        self._names: Final = [*map(floatToGoString, family.buckets), "+Inf"]

    def labels(self, *values: str) -> Spread:
        """Give the histogram with these labels, empty on first sight."""
        return self._children.get(values) or self._children.setdefault(values, Spread(self._family.buckets))

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Tell the family's name, for which it answers."""
        return (self._empty(),)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Give what was counted."""
        collected = self._empty()
        for values, child in tuple(self._children.items()):
            total = child.total
            collected.add_metric(values, child.buckets(self._names), total)
        return (collected,)

    def _empty(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._family.name, self._family.help, labels=self._family.labels)
