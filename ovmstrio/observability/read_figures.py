"""Families whose figures others keep, and which are read whenever somebody scrapes."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ovmstrio.core.metric_families import Family

__all__ = ["ReadFigures", "ReadSpread"]


class ReadFigures:
    """A family of counters or gauges, as a collector.

    Args:
        family: which one.
        read: gives a figure for each combination of labels; from any thread.
    """

    def __init__(self, family: Family, read: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        self._family = family
        self._read = read

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Tell the family's name, for which it answers."""
        return (self._empty(),)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Give the figures of the moment."""
        collected = self._empty()
        for labels, figure in self._read().items():
            collected.add_metric(labels, figure)
        return (collected,)

    def _empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        made = CounterMetricFamily if self._family.kind == "counter" else GaugeMetricFamily
        return made(self._family.name, self._family.help, labels=self._family.labels)


class ReadSpread:
    """A family of one histogram without labels, as a collector.

    Args:
        family: which one.
        read: gives how many values there were up to each bound, and above the last, and the sum of all; from any
            thread.
    """

    def __init__(self, family: Family, read: Callable[[], tuple[Sequence[int], float]]) -> None:
        self._family = family
        self._read = read

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Tell the family's name, for which it answers."""
        return (HistogramMetricFamily(self._family.name, self._family.help),)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Give the figures of the moment."""
        numbers, total = self._read()
        names = [*map(floatToGoString, self._family.buckets), "+Inf"]
        buckets = list(zip(names, accumulate(map(float, numbers)), strict=True))
        return (HistogramMetricFamily(self._family.name, self._family.help, buckets, total),)
