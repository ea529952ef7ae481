"""Counters of a pipeline for Prometheus: the names that dashboards of Paddle Serving ask for, as real counters.

They count from the server's start, in microseconds where they count time, and are not reset by being read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ovmstrio.runtimes.ops.observing.figures import PipelineFigures

__all__ = ["OpMetrics"]

_MICROSECONDS: Final = 1e6
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)

_Values = Mapping[tuple[str, ...], float]


class OpMetrics:
    """Makes counters of a pipeline's figures whenever somebody scrapes; a collector.

    Args:
        figures: what is counted.
    """

    def __init__(self, figures: PipelineFigures) -> None:
        self._figures = figures
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        """Give every family, those of the Ops at zero before anything has happened."""
        figures, totals = self._figures, self._figures.totals
        yield from self._of_requests()
        inferred = sum(each.inferred for each in totals.values())
        inferring = sum(each.seconds.get("midp", 0.0) for each in totals.values())
        yield self._counter("pd_inference_count", "Samples that went through a model or `process`.", inferred)
        spent = "Microseconds in `process`, by its batches."
        yield self._counter("pd_inference_duration_us", spent, _microseconds(inferring))
        stages: dict[tuple[str, ...], float] = {
            (op, stage): _microseconds(seconds)
            for op, each in figures.with_ends.items()
            for stage, seconds in each.seconds.items()
        }
        yield self._counters("ovmstrio_op_stage_us", "Microseconds in each stage of an Op.", ("op", "stage"), stages)
        deaths: dict[tuple[str, ...], float] = {(op,): each.deaths for op, each in totals.items()}
        yield self._counters("ovmstrio_op_worker_deaths", "Workers that ended by themselves.", ("op",), deaths)
        yield self._batches()
        depth = GaugeMetricFamily("ovmstrio_channel_depth", "Samples that wait between Ops.", labels=["channel"])
        for channel in figures.channels:
            depth.add_metric([channel.name], channel.size)
        yield depth

    def _of_requests(self) -> Iterable[Metric]:
        codes = self._figures.codes
        succeeded, took = codes.get(0, 0), _microseconds(self._figures.seconds)
        failed = codes.total() - succeeded
        yield self._counter("pd_query_request_success", "Requests that were answered without an error.", succeeded)
        yield self._counter("pd_query_request_failure", "Requests that were answered with an error.", failed)
        yield self._counter("pd_query_request_duration_us", "Microseconds that requests took.", took)
        ends: dict[tuple[str, ...], float] = {(str(code),): count for code, count in codes.items()}
        if self._figures.left:
            ends["left",] = self._figures.left
        text = "Requests by err_no; `left` without one."
        yield self._counters("ovmstrio_pipeline_requests", text, ("code",), ends)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), {(): value})

    def _counters(self, name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
        family = CounterMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(key, value, created=self._created)
        return family

    def _batches(self) -> Metric:
        name = "ovmstrio_op_batch_size"
        family = HistogramMetricFamily(name, "Samples in each batch.", labels=["op"])
        for op, figures in self._figures.totals.items():
            buckets = [(f"{most:.1f}", _upto(figures.batches, most)) for most in _BATCH_SIZES]
            buckets.append(("+Inf", _upto(figures.batches, math.inf)))
            total = sum(size * count for size, count in figures.batches.items())
            family.add_metric([op], buckets, total)
            family.add_sample(f"{name}_created", {"op": op}, self._created)
        return family


def _microseconds(seconds: float) -> float:
    return max(0.0, seconds) * _MICROSECONDS


def _upto(batches: Mapping[int, int], most: float) -> float:
    """Tell how many batches have so many samples at most."""
    return sum(count for size, count in batches.items() if size <= most)
