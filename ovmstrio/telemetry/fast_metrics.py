"""Counters and histograms without locks; those of prometheus_client take a lock per update.

Updated on the event loop only, read by any thread.
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


class FastCounter:
    """A counter."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def inc(self, amount: int = 1) -> None:
        """Increase the counter."""
        self.number += amount


class FastHistogram:
    """A histogram.

    Attributes:
        numbers: number of values per bucket.
        total: sum of the values.
        traced: last exemplar per bucket; None while there are none.
    """

    __slots__ = ("_bounds", "exemplars", "numbers", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.numbers = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] | None = None

    def observe(self, value: float, trace_id: str = "") -> None:
        """Add a value, with an exemplar if it belongs to a trace."""
        bucket = bisect_left(self._bounds, value)
        self.numbers[bucket] += 1
        self.total += value
        if trace_id:
            if self.exemplars is None:
                self.exemplars = {}
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time())

    def buckets(self, names: Sequence[str]) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return name, cumulative count and exemplar of each bucket."""
        entries: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        entries += zip(names, accumulate(map(float, self.numbers)), strict=True)
        for bucket, exemplar in tuple((self.exemplars or {}).items()):
            entries[bucket] = (entries[bucket][0], entries[bucket][1], exemplar)
        return entries


class FastCounterFamily:
    """Collector of a counter family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], FastCounter] = {}

    def labels(self, *values: str) -> FastCounter:
        """Return the counter with these labels, created at zero."""
        return self._children.get(values) or self._children.setdefault(values, FastCounter())

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the family without samples."""
        return (self._empty(),)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return all counters."""
        collected = self._empty()
        for values, child in tuple(self._children.items()):
            collected.add_metric(values, child.number)
        return (collected,)

    def _empty(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._family.name, self._family.help, labels=self._family.labels)


class FastHistogramFamily:
    """Collector of a histogram family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], FastHistogram] = {}
        self._names: Final = [*map(floatToGoString, family.buckets), "+Inf"]

    def labels(self, *values: str) -> FastHistogram:
        """Return the histogram with these labels, created empty."""
        return self._children.get(values) or self._children.setdefault(values, FastHistogram(self._family.buckets))

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the family without samples."""
        return (self._empty(),)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return all histograms."""
        collected = self._empty()
        for values, child in tuple(self._children.items()):
            total = child.total
            collected.add_metric(values, child.buckets(self._names), total)
        return (collected,)

    def _empty(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._family.name, self._family.help, labels=self._family.labels)
