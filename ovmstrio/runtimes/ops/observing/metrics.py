"""Counters of a pipeline for Prometheus: the names that dashboards of Paddle Serving ask for, as real counters.

They count from the server's start, in microseconds where they count time, and are not reset by being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client.core import GaugeMetricFamily

from ovmstrio.runtimes.ops.observing.hooks import ChannelState, Span, Stage

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["OpMetrics"]

_MICROSECONDS: Final = 1e6
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class OpMetrics:
    """Counts what the executor reports; an observer of one pipeline.

    Args:
        registry: the server's, of which ``/metrics`` is rendered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> prometheus_client.Counter:
            return prometheus_client.Counter(name, text, labels, registry=registry)

        self._succeeded = counter("pd_query_request_success_total", "Requests that were answered without an error.")
        self._failed = counter("pd_query_request_failure_total", "Requests that were answered with an error.")
        self._request_us = counter("pd_query_request_duration_us_total", "Microseconds that requests took.")
        self._inferences = counter("pd_inference_count_total", "Samples that went through a model or `process`.")
        self._inference_us = counter("pd_inference_duration_us_total", "Microseconds in `process`, by its batches.")
        self._codes = counter("ovmstrio_pipeline_requests_total", "Requests by err_no; `left` without one.", "code")
        self._stage_us = counter("ovmstrio_op_stage_us_total", "Microseconds in each stage of an Op.", "op", "stage")
        self._deaths = counter("ovmstrio_op_worker_deaths_total", "Workers that ended by themselves.", "op")
        self._batches = prometheus_client.Histogram(
            "ovmstrio_op_batch_size", "Samples in each batch.", ["op"], registry=registry, buckets=_BATCH_SIZES
        )
        self._stages: dict[tuple[str, Stage], prometheus_client.Counter] = {}
        self._channels: Callable[[], Sequence[ChannelState]] = tuple
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Give what waits between Ops, for the registry."""
        depth = GaugeMetricFamily("ovmstrio_channel_depth", "Samples that wait between Ops.", labels=["channel"])
        for each in self._channels():
            depth.add_metric([each.name], each.size)
        yield depth

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Let the families of the Ops exist at zero."""
        self._channels = channels
        for op in ops:
            self._deaths.labels(op)
            self._batches.labels(op)

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False) -> None:
        """Take no note of it."""

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:  # noqa: ARG002
        """Count a stage."""
        spent = max(0.0, span[1] - span[0]) * _MICROSECONDS
        if (op, stage) not in self._stages:  # to look one up by its labels takes longer than all the rest
            self._stages[op, stage] = self._stage_us.labels(op, stage)
        self._stages[op, stage].inc(spent)
        if stage == "midp":
            self._inferences.inc(len(data_ids))
            self._inference_us.inc(spent)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:  # noqa: ARG002
        """Count a batch."""
        self._batches.labels(op).observe(len(data_ids))

    def worker_died(self, op: str, worker: int, reason: str) -> None:  # noqa: ARG002
        """Count a worker that ended by itself."""
        self._deaths.labels(op).inc()

    def timeline(self, data_id: int) -> str:  # noqa: ARG002
        """Give none: timelines are another observer's."""
        return ""

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Count a request out."""
        del data_id, log_id, message
        self._codes.labels("left" if code is None else str(code)).inc()
        if code is None:
            return
        (self._failed if code else self._succeeded).inc()
        self._request_us.inc(max(0.0, span[1] - span[0]) * _MICROSECONDS)
