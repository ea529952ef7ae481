"""Counters of a pipeline for Prometheus: the names that dashboards of Paddle Serving ask for, as real counters.

They count from the server's start, in microseconds where they count time, and are not reset by being read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ovmstrio.runtimes.ops.observing.figures import Figures

__all__ = ["NULL", "STAGES", "ChannelState", "OpHooks", "OpMetrics", "Several", "Span", "Stage"]

Span = tuple[float, float]
"""When something began and ended."""

Stage = Literal["in", "prep", "midp", "postp", "out", "prepack", "postpack"]
"""``in`` waits for input, ``out`` hands on; ``prepack`` and ``postpack`` are the RequestOp's and the ResponseOp's."""

STAGES: Final[tuple[Stage, ...]] = ("in", "prep", "midp", "postp", "out")
"""The stages of an Op, in order."""


@dataclass(frozen=True, slots=True)
class ChannelState:
    """What waits between Ops: samples in ``size``, at most ``capacity``, which is 0 for any number."""

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    size: int
    capacity: int = 0


class OpHooks:
    """An observer of one running pipeline; takes no note of what it does not override.

    Attributes:
        wants_stages: whether it is told of stages now; most calls are about these.
    """

    wants_stages: bool = True

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Take note that Ops run; ``channels`` tells at any time what waits between them."""

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False) -> None:
        """Take note that a request is worked on; with ``profile`` its timeline will be asked for."""

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Take note of one stage of one worker, which concerned these samples."""

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Take note of the samples that a worker takes together."""

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Take note of a worker that ended by itself; another takes its place."""

    def timeline(self, data_id: int) -> str:  # noqa: ARG002 - a request of which this keeps none has none
        """Give the timeline of a request that is still to be finished; empty where none is kept."""
        return ""

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Take note of a request's end: ``code`` is its ``err_no``, None if the client left; ``message`` its text."""


class Several(OpHooks):
    """Passes everything on to several observers, as far as they take note of it.

    Args:
        observers: whom to tell, in this order.
    """

    def __init__(self, *observers: OpHooks) -> None:
        def listeners(name: str) -> tuple[Any, ...]:
            return tuple(
                getattr(one, name) for one in observers if getattr(type(one), name) is not getattr(OpHooks, name)
            )

        self._opened = listeners("opened")
        self._request_started = listeners("request_started")
        self._of_stages = [one for one in observers if type(one).stage is not OpHooks.stage]
        self._batch = listeners("batch")
        self._worker_died = listeners("worker_died")
        self._timeline = listeners("timeline")
        self._request_finished = listeners("request_finished")

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Tell that Ops run."""
        for each in self._opened:
            each(ops, channels)

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False) -> None:
        """Tell that a request is worked on."""
        for each in self._request_started:
            each(data_id, log_id, profile=profile)

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Tell of one stage."""
        for each in self._of_stages:
            if each.wants_stages:
                each.stage(op, worker, stage, data_ids, span)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Tell of one batch."""
        for each in self._batch:
            each(op, worker, data_ids)

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Tell that a worker ended by itself."""
        for each in self._worker_died:
            each(op, worker, reason)

    def timeline(self, data_id: int) -> str:
        """Give the timeline of the observer that keeps it."""
        return next((text for each in self._timeline if (text := each(data_id))), "")

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Tell of a request's end."""
        for each in self._request_finished:
            each(data_id, log_id, code, span, message)


NULL: Final[OpHooks] = OpHooks()
"""Nobody is told."""


_MICROSECONDS: Final = 1e6
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)

_Values = Mapping[tuple[str, ...], float]


class OpMetrics:
    """Makes counters of a pipeline's figures whenever somebody scrapes; a collector.

    Args:
        figures: what is counted.
    """

    def __init__(self, figures: Figures) -> None:
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
