"""Observers of one running pipeline: counters, tracer, timelines, inspection, metrics, live view and request log."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import prometheus_client
import structlog
import trio
import yaml
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.service import Introspection, NodeCounters
from ovmstrio.ops.observing.hooks import (
    STAGES,
    UNKNOWN_CALLER,
    Caller,
    ChannelState,
    CompositeHooks,
    OpHooks,
    Span,
    Stage,
)
from ovmstrio.ops.observing.log_files import current_samples, open_log_files
from ovmstrio.util.regular_files import open_regular

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from ovmstrio.ops.observing.log_files import LogFiles
    from ovmstrio.ops.settings import PipelineSettings
    from ovmstrio.util.drawing import Drawing

# ----------------------------------------------------------------------
# Counters: totals since start, tracer windows, and the newest values for the live view
# ----------------------------------------------------------------------

_MAX_NEWEST: Final = 1024


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile of ascending values; 0 without values."""
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0


@dataclass(slots=True)
class OpCounters:
    """Counters of one Op: seconds and calls by stage, processed samples, and batch sizes."""

    seconds: dict[Stage, float] = field(default_factory=dict)
    counts: dict[Stage, int] = field(default_factory=dict)
    inferred: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    deaths: int = 0

    def average(self, stage: Stage) -> float:
        """Average seconds of a stage."""
        return self.seconds[stage] / self.counts[stage] if stage in self.counts else 0.0

    @property
    def idle(self) -> float:
        """Share of time in which the Op did no work, from the average stage times."""
        averages = {stage: self.average(stage) for stage in STAGES}
        total = sum(averages.values())
        return 1 - (averages["prep"] + averages["midp"] + averages["postp"]) / total if total else 0.0


@dataclass(slots=True)
class RequestCounters:
    """Counters of requests: seconds of answered ones, ids of failed ones, and number of disconnected clients."""

    seconds: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    left: int = 0
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of answered requests."""
        return len(self.seconds)


@dataclass(slots=True)
class CounterWindow:
    """Counters of one tracer interval."""

    began: float
    ops: dict[str, OpCounters] = field(default_factory=dict)
    requests: RequestCounters = field(default_factory=RequestCounters)


def null_node_hooks(_op: str) -> NodeHooks:
    """Return hooks that ignore everything."""
    return NULL_NODE_HOOKS


class PipelineCounters(OpHooks):
    """Counters of one pipeline, updated by executor hooks; ``tallies`` holds statistics of batches by Op.

    ``keeps_window`` fills tracer windows, which grow until taken.  ``hooks_of`` returns additional hooks for an Op.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps_window: bool = True,
        hooks_of: Callable[[str], NodeHooks] = null_node_hooks,
    ) -> None:
        self._clock = clock
        self._hooks_of = hooks_of
        self.tallies: dict[str, NodeCounters] = {}
        self._keeps_window = keeps_window
        self.began = clock()
        self.running = 0
        self.codes: Counter[int] = Counter()
        self.left = 0
        self.seconds = 0.0
        self._package_hooks: dict[str, OpCounters] = {}
        self.totals: dict[str, OpCounters] = {}
        self.newest: dict[tuple[str, Stage], deque[float]] = {}
        self.newest_requests: deque[tuple[float, float]] = deque(maxlen=_MAX_NEWEST)
        self._window = CounterWindow(self.began)
        self._channels: Callable[[], Sequence[ChannelState]] = tuple

    @property
    def now(self) -> float:
        """Current time in seconds."""
        return self._clock()

    @property
    def totals_with_package_hooks(self) -> dict[str, OpCounters]:
        """Totals of the Ops, and of RequestOp and ResponseOp under their common name."""
        return {**self._package_hooks, **self.totals}

    @property
    def channels(self) -> Sequence[ChannelState]:
        """Current state of the channels."""
        return self._channels()

    def take_window(self) -> CounterWindow:
        """Return the current window and start a new one."""
        taken, self._window = self._window, CounterWindow(self.now)
        return taken

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Start counters for these Ops."""
        self.totals = {op: OpCounters() for op in ops}
        self.tallies = {op: NodeCounters(self._hooks_of(op)) for op in ops}
        self._channels = channels

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Count a started request."""
        del data_id, log_id, profile, caller
        self.running += 1

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:  # noqa: ARG002 - the hook has it
        """Count a stage; stages of RequestOp and ResponseOp have separate totals."""
        seconds = span[1] - span[0]
        is_op = op in self.totals
        totals = self.totals if is_op else self._package_hooks
        if op not in totals:
            totals[op] = OpCounters()
        counters = [totals[op]]
        if is_op and self._keeps_window:
            counters.append(self._window.ops.setdefault(op, OpCounters()))
        for figures in counters:
            figures.seconds[stage] = figures.seconds.get(stage, 0.0) + seconds
            figures.counts[stage] = figures.counts.get(stage, 0) + 1
            if stage == "midp":
                figures.inferred += len(data_ids)
        if not is_op:
            return
        key = (op, stage)
        if key not in self.newest:
            self.newest[key] = deque(maxlen=_MAX_NEWEST)
        self.newest[key].append(seconds)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:  # noqa: ARG002 - the hook has it
        """Count a started batch."""
        if op in self.totals:
            self.tallies[op].begin()
            self.totals[op].batches[len(data_ids)] += 1
            if self._keeps_window:
                self._window.ops.setdefault(op, OpCounters()).batches[len(data_ids)] += 1

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:  # noqa: ARG002 - the hook has it
        """Count a finished batch."""
        tally = self.tallies.get(op)
        if tally is None:
            return
        if failed is None:
            tally.left()
        elif failed:
            tally.failed(begun)
        else:
            tally.succeeded(begun)

    def worker_died(self, op: str, worker: int, reason: str) -> None:  # noqa: ARG002 - the hook has it
        """Count an unexpected worker exit."""
        if op in self.totals:
            self.totals[op].deaths += 1

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Count a finished request."""
        del log_id, message
        self.running -= 1
        if code is None:
            self.left += 1
        else:
            self.codes[code] += 1
            self.seconds += span[1] - span[0]
            self.newest_requests.append((span[1], span[1] - span[0]))
        if self._keeps_window:
            _count_end(self._window.requests, data_id, code, span[1] - span[0])


def _count_end(requests: RequestCounters, data_id: int, code: int | None, seconds: float) -> None:
    if code is None:
        requests.left += 1
        return
    requests.codes[code] += 1
    requests.seconds.append(seconds)
    if code:
        requests.failed.append(data_id)


# ----------------------------------------------------------------------
# Observers
# ----------------------------------------------------------------------

# Tracer and timelines


_RECORDED: Final = frozenset({"prep", "midp", "postp"})
_MICROSECONDS: Final = 1e6
_MAX_TIMELINES: Final = 10_000


class Timelines(OpHooks):
    """Hooks that record timelines on request, or of ``everything``, which go to ``out`` or standard error."""

    def __init__(self, *, everything: bool = False, out: TextIO | None = None) -> None:
        self._everything = everything
        self._out = out
        self._timelines: dict[int, list[str]] = {}
        self.wants_stages = False
        self._began: dict[int, float] = {}
        self._offset = time.time() - time.perf_counter()

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Start a timeline if requested."""
        del log_id, caller
        if (profile or self._everything) and len(self._timelines) < _MAX_TIMELINES:
            self._timelines[data_id] = []
            self._began[data_id] = time.perf_counter()
            self.wants_stages = True

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Add a stage to the timelines of its samples."""
        for data_id in data_ids:
            if data_id in self._timelines and (name := _name(op, worker, stage, data_id)):
                self._timelines[data_id] += self._marks(name, span)

    def timeline(self, data_id: int) -> str:
        """Return the timeline of a running request; empty if none is recorded."""
        if data_id not in self._timelines:
            return ""
        call = (self._began[data_id], time.perf_counter())
        return self._line(data_id, call)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Write the timeline if all are written, and drop it."""
        del log_id, code, message
        if data_id not in self._timelines:
            return
        if self._everything:
            # A closed output stream must not fail the request.
            with suppress(OSError, ValueError):
                print(self._line(data_id, span), file=self._out or sys.stderr, flush=True)
        del self._timelines[data_id], self._began[data_id]
        self.wants_stages = bool(self._timelines)

    def _line(self, data_id: int, call: Span) -> str:
        marks = [*self._timelines[data_id], *self._marks(f"call_{data_id}#DAG", call)]
        return f"PROFILE\tpid:{os.getpid()}\t{' '.join(marks)}"

    def _marks(self, name: str, span: Span) -> list[str]:
        return [f"{name}_{tag}:{round((at + self._offset) * _MICROSECONDS)}" for tag, at in enumerate(span)]


def _name(op: str, worker: int, stage: Stage, data_id: int) -> str:
    if stage in {"prepack", "postpack"}:
        return f"{stage}_{data_id}#{op}"
    return f"{stage}#[{op}|{worker}]" if stage in _RECORDED else ""


PERCENTS: Final = (50, 60, 70, 80, 90, 95, 99)

_HEADER: Final = "==================== TRACER ======================"
_MS: Final = 1e3


def tracer_lines(window: CounterWindow, now: float, channels: Sequence[ChannelState], worker_num: int) -> list[str]:
    """Return the lines of one window; Ops and requests without events are omitted."""
    lines = [_HEADER]
    for name, figures in window.ops.items():
        lines += _op_lines(name, figures)
    if window.requests.count:
        lines += _request_lines(window.requests, now - window.began)
    return [*lines, *_channel_lines(channels, worker_num)]


def benchmark_document(window: CounterWindow, now: float) -> dict[str, object]:
    """Return the figures of a window as a mapping for load scripts; empty without events."""
    document: dict[str, object] = {name: _op_figures(figures) for name, figures in window.ops.items()}
    if window.requests.count:
        document["DAG"] = _request_figures(window.requests, now - window.began)
    return document


def _op_lines(name: str, figures: OpCounters) -> list[str]:
    stages = [f"\t{stage}[{figures.average(stage) * _MS} ms]" for stage in STAGES]
    return [f"Op({name}):", *stages, f"\tidle[{figures.idle}]"]


def _request_lines(requests: RequestCounters, seconds: float) -> list[str]:
    figures = _request_figures(requests, seconds)
    return [
        "DAGExecutor:",
        f"\tQuery count[{requests.count}]",
        f"\tQPS[{figures['qps']} q/s]",
        f"\tSucc[{figures['succ']}]",
        f"\tError req[{', '.join(map(str, requests.failed))}]",
        "\tLatency:",
        f"\t\tave[{figures['avg']} ms]",
        *(f"\t\t.{percent}[{figures[str(percent)]} ms]" for percent in PERCENTS),
    ]


def _channel_lines(channels: Sequence[ChannelState], worker_num: int) -> list[str]:
    return [
        f"Channel (server worker num[{worker_num}]):",
        *(
            f"\t{each.name}(In: {list(each.producers)}, Out: {list(each.consumers)}) size[{each.size}/{each.capacity}]"
            for each in channels
        ),
    ]


def _op_figures(figures: OpCounters) -> dict[str, float]:
    return {**{stage: figures.average(stage) * _MS for stage in STAGES}, "idle": figures.idle}


def _request_figures(requests: RequestCounters, seconds: float) -> Mapping[str, float]:
    times = sorted(each * _MS for each in requests.seconds)
    return {
        "query_count": requests.count,
        "qps": requests.count / seconds if seconds > 0 else 0.0,
        "succ": 1 - len(requests.failed) / requests.count,
        "avg": sum(times) / len(times),
        **{str(percent): percentile(times, percent) for percent in PERCENTS},
    }


# Inspection


def inspect(figures: PipelineCounters, drawing: Drawing | None) -> Introspection:
    """Return the drawing of a pipeline with the statistics of its Ops."""
    layers = () if drawing is None else drawing.layers
    keys = {box.title: box.key for layer in layers for box in layer if box.kind == "node"}
    waiting: dict[str, int] = {}
    for channel in figures.channels:
        for key in {keys[name] for name in channel.consumers if name in keys}:
            waiting[key] = waiting.get(key, 0) + channel.size
    nodes = {keys[name]: tally for name, tally in figures.tallies.items() if name in keys}
    facts = {
        "requests under way": figures.running,
        "clients that left": figures.left,
        "worker deaths": sum(each.deaths for each in figures.totals.values()),
    }
    return Introspection(drawing, facts, nodes, waiting=waiting)


# Prometheus metrics

_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)

_Values = Mapping[tuple[str, ...], float]


class OpMetrics:
    """Prometheus collector for a pipeline, with the metric names of Paddle Serving."""

    def __init__(self, figures: PipelineCounters) -> None:
        self._figures = figures
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families; metrics of Ops start at zero."""
        figures, totals = self._figures, self._figures.totals
        yield from self._request_metrics()
        inferred = sum(each.inferred for each in totals.values())
        inferring = sum(each.seconds.get("midp", 0.0) for each in totals.values())
        yield self._counter("pd_inference_count", "Samples processed by a model or `process`.", inferred)
        spent = "Microseconds in `process`, summed over batches."
        yield self._counter("pd_inference_duration_us", spent, _microseconds(inferring))
        stages: dict[tuple[str, ...], float] = {
            (op, stage): max(0.0, seconds)
            for op, each in figures.totals_with_package_hooks.items()
            for stage, seconds in each.seconds.items()
        }
        yield self._counters("ovmstrio_op_stage_seconds", "Seconds in each stage of an Op.", ("op", "stage"), stages)
        deaths: dict[tuple[str, ...], float] = {(op,): each.deaths for op, each in totals.items()}
        yield self._counters("ovmstrio_op_worker_deaths", "Unexpected worker exits.", ("op",), deaths)
        yield self._batches()
        depth = GaugeMetricFamily("ovmstrio_channel_depth", "Samples waiting between Ops.", labels=["channel"])
        for channel in figures.channels:
            depth.add_metric([channel.name], channel.size)
        yield depth

    def _request_metrics(self) -> Iterable[Metric]:
        codes = self._figures.codes
        succeeded, duration = codes.get(0, 0), _microseconds(self._figures.seconds)
        failed = codes.total() - succeeded
        yield self._counter("pd_query_request_success", "Requests answered without an error.", succeeded)
        yield self._counter("pd_query_request_failure", "Requests answered with an error.", failed)
        yield self._counter("pd_query_request_duration_us", "Total request time in microseconds.", duration)
        ends: dict[tuple[str, ...], float] = {(str(code),): count for code, count in codes.items()}
        if self._figures.left:
            ends["left",] = self._figures.left
        text = "Requests by err_no; `left` for disconnected clients."
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
            buckets = [(f"{most:.1f}", _count_up_to(figures.batches, most)) for most in _BATCH_SIZES]
            buckets.append(("+Inf", _count_up_to(figures.batches, math.inf)))
            total = sum(size * count for size, count in figures.batches.items())
            family.add_metric([op], buckets, total)
            family.add_sample(f"{name}_created", {"op": op}, self._created)
        return family


def _microseconds(seconds: float) -> float:
    return max(0.0, seconds) * _MICROSECONDS


def _count_up_to(batches: Mapping[int, int], limit: float) -> float:
    return sum(count for size, count in batches.items() if size <= limit)


# Snapshot, log and tracer

_RATE_SECONDS: Final = 10.0


def snapshot(figures: PipelineCounters, worker_num: int) -> dict[str, Any]:
    """Return the current figures; times are milliseconds, percentiles cover the newest values."""
    latencies = [seconds for _, seconds in figures.newest_requests]
    return {
        "uptime_s": figures.now - figures.began,
        "worker_num": worker_num,
        "running": figures.running,
        "left": figures.left,
        "codes": {str(code): count for code, count in sorted(figures.codes.items())},
        "requests": {"count": figures.codes.total(), "qps": _rate(figures), "latency_ms": _times(latencies)},
        "ops": {name: _op_snapshot(figures, name) for name in figures.totals},
        "channels": [
            {
                "name": each.name,
                "in": list(each.producers),
                "out": list(each.consumers),
                "size": each.size,
                "capacity": each.capacity,
            }
            for each in figures.channels
        ],
    }


def _op_snapshot(figures: PipelineCounters, name: str) -> dict[str, Any]:
    of_op = figures.totals[name]
    return {
        "idle": of_op.idle,
        "deaths": of_op.deaths,
        "batches": {str(size): count for size, count in sorted(of_op.batches.items())},
        "stages": {
            stage: {"count": of_op.counts.get(stage, 0), **_times(list(figures.newest.get((name, stage), ())))}
            for stage in STAGES
        },
    }


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(each * _MS for each in seconds)
    average = sum(ordered) / len(ordered) if ordered else 0.0
    return {"avg": average, **{str(percent): percentile(ordered, percent) for percent in PERCENTS}}


def _rate(figures: PipelineCounters) -> float:
    ended = [at for at, _ in figures.newest_requests]
    since = max(figures.now - _RATE_SECONDS, figures.began)
    if len(ended) == figures.newest_requests.maxlen:
        since = max(since, ended[0])
    recent = sum(1 for at in ended if at >= since)
    return recent / (figures.now - since) if figures.now > since else 0.0


class OpLog(OpHooks):
    """Hooks that log requests, batches and worker exits with the sample ids, and answered requests to ``files``."""

    def __init__(self, files: LogFiles | None = None) -> None:
        self._files = files
        self._log_ids: dict[int, int] = {}
        self._callers: dict[int, str] = {}

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Record the ids and the caller."""
        del profile
        self._log_ids[data_id] = log_id
        if self._files is not None:
            client, method = caller
            self._callers[data_id] = f"client={client or '-'} method={method or '-'}"

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Log the samples of a batch with more than one sample."""
        if len(data_ids) > 1:
            with current_samples(*((data_id, self._log_ids.get(data_id, 0)) for data_id in data_ids)):
                _log.info("batch", op=op, worker=worker, data_ids=list(data_ids))

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Log an unexpected worker exit."""
        _log.error("worker died, replacing it", op=op, worker=worker, reason=reason)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Log the end of a request; a failure is a warning."""
        self._log_ids.pop(data_id, None)
        caller = self._callers.pop(data_id, "")
        if code == 0 and self._files is None and not _LEVEL.isEnabledFor(logging.DEBUG):
            return
        milliseconds = round((span[1] - span[0]) * 1e3, 3)
        with current_samples((data_id, log_id)):
            if code is None:
                _log.info("client left", ms=milliseconds)
            elif code:
                _log.warning("request failed", err_no=code, err_msg=message, ms=milliseconds)
            elif self._files is None:
                _log.debug("request answered", ms=milliseconds)
            else:
                self._files.note(f"request answered {caller} ms={milliseconds}")


BENCHMARK_VARIABLE: Final = "FLAGS_profile_pipeline"
"""If set to 1, the tracer also writes its figures to ``benchmark.log`` in the current directory."""

_BENCHMARK_FILE: Final = Path("benchmark.log")
_log = structlog.get_logger(__name__)
_LEVEL: Final = logging.getLogger(__name__)
"""Standard logger for level checks; a check through structlog costs as much as a log call."""


@dataclass(frozen=True, slots=True)
class PipelineObservers:
    """Observers of a pipeline: hooks for the executor, counters and metrics for endpoints."""

    hooks: OpHooks
    figures: PipelineCounters
    registry: CollectorRegistry
    _worker_num: int

    def snapshot(self) -> dict[str, Any]:
        """Return the figures for the live view."""
        return snapshot(self.figures, self._worker_num)

    def inside(self, drawing: Drawing | None) -> Introspection:
        """Return the drawing of the pipeline with the statistics of its Ops."""
        return inspect(self.figures, drawing)

    @property
    def collectors(self) -> tuple[CollectorRegistry]:
        """Collectors of the metric families."""
        return (self.registry,)

    def render_metrics(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry)


@asynccontextmanager
async def open_observers(
    settings: PipelineSettings,
    registry: CollectorRegistry | None = None,
    hooks_of: Callable[[str], NodeHooks] = null_node_hooks,
) -> AsyncIterator[PipelineObservers]:
    """Open log files and run the tracer, if enabled, within the block; raises ConfigError for unwritable files.

    Errors of the block arrive in an exception group.  ``hooks_of`` returns additional hooks for the batches of an Op.
    """
    registry = prometheus_client.CollectorRegistry() if registry is None else registry
    figures = PipelineCounters(keeps_window=settings.dag.tracer.enabled, hooks_of=hooks_of)
    timelines = Timelines(everything=settings.dag.use_profile)
    with open_log_files(settings.logging) as files:
        registry.register(OpMetrics(figures))
        hooks = CompositeHooks(figures, timelines, OpLog(files))
        async with trio.open_nursery() as nursery:
            if settings.dag.tracer.enabled:
                nursery.start_soon(_trace, settings, figures, files)
            yield PipelineObservers(hooks, figures, registry, settings.worker_num)
            nursery.cancel_scope.cancel()


async def _trace(settings: PipelineSettings, figures: PipelineCounters, files: LogFiles | None) -> None:
    wants_benchmark = os.environ.get(BENCHMARK_VARIABLE) == "1"
    while True:
        await trio.sleep(settings.dag.tracer.interval_s)
        _write(figures, settings.worker_num, files, wants_benchmark=wants_benchmark)


def _write(figures: PipelineCounters, worker_num: int, files: LogFiles | None, *, wants_benchmark: bool) -> None:
    window, now = figures.take_window(), figures.now
    if files is not None:
        for line in tracer_lines(window, now, figures.channels, worker_num):
            files.trace(line)
    document = benchmark_document(window, now) if wants_benchmark else {}
    if document:
        try:
            with open_regular(_BENCHMARK_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                file.write(yaml.safe_dump(document).encode())
        except OSError as error:
            _log.warning("benchmark file not written", file=str(_BENCHMARK_FILE), reason=str(error))
