"""Prometheus metrics of one server: OVMS's families under OVMS's names, and a few of our own.

Every label combination of a servable's counters exists, at zero, from the moment it is loaded, and its children are
bound then, so that counting costs no look-up by label; histograms exist once there is something in them.  Graphs have
families of their own (``graph_metrics``).
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property, partial
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.utils import floatToGoString

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, ServerError
from ovmstrio.core.events import CANCELLED, OK, QUESTIONS, Step
from ovmstrio.core.hooks import BatchHooks, Collectors, GraphHooks, Meters, NodeHooks, ServableHooks
from ovmstrio.core.metric_families import FAMILIES, LOOP_DELAY, OWN_FAMILIES, READ_FAMILIES
from ovmstrio.telemetry.fast_metrics import Count, Counts, Spreads
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.telemetry.process_metrics import PROCESS_FIGURES, work_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.events import CallEvent, Door
    from ovmstrio.core.metric_families import Family
    from ovmstrio.core.resource_registry import Census

__all__ = [
    "CONTENT_TYPE",
    "OPEN_CONTENT_TYPE",
    "BatchMetrics",
    "CallMetrics",
    "GraphMetrics",
    "Metrics",
    "NodeMetrics",
    "ReadFigures",
    "ReadSpread",
    "ServableMetrics",
    "ServiceMetrics",
    "with_vllm_names",
]

# ----------------------------------------------------------------------
# The metrics of one graph, which has no versions
# ----------------------------------------------------------------------

_STREAM: Final = "ModelInferStream"
_RUN: Final = ("ModelInfer", _STREAM)
_INFER: Final = (*((method, "KServe") for method in _RUN), ("Predict", "TensorFlowServing"))
_ASK: Final = (
    ("ModelMetadata", "KServe"),
    ("ModelReady", "KServe"),
    ("GetModelMetadata", "TensorFlowServing"),
    ("GetModelStatus", "TensorFlowServing"),
)
_INTERFACES: Final = ("gRPC", "REST")
_FAMILIES: Final = ("ovms_requests_accepted", "ovms_requests_rejected", "ovms_responses", "ovms_graph_error")
_MICROSECONDS: Final = 1e6
_FAMILY_OF: Final = {
    Step.ACCEPTED: "ovms_requests_accepted",
    Step.REJECTED: "ovms_requests_rejected",
    Step.ANSWERED: "ovms_responses",
}


class _Children(Protocol):
    """Gives bound children of metric families."""

    def child(self, family: str, *labels: str) -> Any:
        """Give one, or one that counts nothing where the family is off."""
        ...

    def node(self, name: str, node: str) -> NodeHooks:
        """Give what records the runs of a node."""
        ...


class GraphMetrics(GraphHooks):
    """The bound metrics of one graph: hooks for its instances, and counters of its calls.

    ``method`` is that of a call or stream; a graph itself runs for ``ModelInfer`` or ``ModelInferStream`` only.
    """

    def __init__(self, metrics: _Children, name: str) -> None:
        self._name = name
        self._child = metrics.child
        self._node_of = metrics.node
        self._current = metrics.child("ovms_current_graphs", name)
        self._seconds = {method: metrics.child("ovms_graph_processing_time_us", name, method) for method in _RUN}
        self._counter = cache(lambda family, *labels: metrics.child(family, name, *labels))
        self._outcome = cache(self._bind_outcome)
        for family, (method, api), interface in product(_FAMILIES, _INFER, _INTERFACES):
            self._counter(family, api, method, interface)
        for (method, api), interface in product((*_INFER, *_ASK), _INTERFACES):
            for code in (OK, "InvalidRequest"):
                self._outcome(method, api, interface, code)

    # Instances

    def started(self) -> None:
        """Count an instance that has begun to run."""
        self._current.inc()

    def finished(self, method: str, seconds: float, *, ok: bool) -> None:
        """Count out an instance that had begun; the time of those that failed is not recorded, as in OVMS."""
        self._current.dec()
        if ok:
            self._seconds[method].observe(seconds * _MICROSECONDS)

    def node(self, node: str) -> NodeHooks:
        """Record the runs of a node."""
        return self._node_of(self._name, node)

    # Calls

    def moved(self, event: CallEvent, step: Step) -> None:
        """Count a request that the graph took in or refused, or an answer: of a stream, each one."""
        self._count(_FAMILY_OF[step], event)

    def ended(self, event: CallEvent) -> None:
        """Count a call by its outcome; inference moves none of the families of models."""
        for counter in self._outcome(event.method, event.door.api, event.door.interface, event.code):
            counter.inc()
        if event.method == _STREAM:
            if isinstance(event.error, ServerError):
                self._count("ovms_graph_error", event)
        elif event.method not in QUESTIONS:
            self._count_call(event)

    def _count_call(self, event: CallEvent) -> None:
        """Count a call that was answered, was refused or has failed; one that was cancelled is none of its errors."""
        is_refused = isinstance(event.error, InvalidRequest | FailedPrecondition)
        self._count("ovms_requests_rejected" if is_refused else "ovms_requests_accepted", event)
        if event.code == OK:
            self._count("ovms_responses", event)
        elif event.is_read and event.code != CANCELLED:
            self._count("ovms_graph_error", event)

    def _count(self, family: str, event: CallEvent) -> None:
        self._counter(family, event.door.api, event.method, event.door.interface).inc()

    def _bind_outcome(self, method: str, api: str, interface: str, code: str) -> tuple[Any, ...]:
        labels = (self._name, "", api, method, interface)
        requests = self._child("ovmstrio_requests", *labels, code)
        if method not in QUESTIONS:
            return (requests,)
        return requests, self._child("ovms_requests_success" if code == OK else "ovms_requests_fail", *labels)


# ----------------------------------------------------------------------
# Families whose figures others keep, and which are read whenever somebody scrapes
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Metrics of models of text under the names that vLLM has for them, beside the server's own, for what reads those
# ----------------------------------------------------------------------

_OWN: Final = "ovmstrio_llm_"
_ENGINE: Final = {"engine": "0"}
"""A label that vLLM has, which counts the engines of a model."""

_NAMES: Final[Mapping[str, str]] = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "preemptions": "num_preemptions",
}
"""Families that differ in their names alone, as vLLM writes them behind ``vllm:``."""

_FINISHED: Final = "requests_finished"
_REASONS: Final[Mapping[str, str]] = {"tool_calls": "stop", "cancelled": "abort"}
"""Ends that vLLM calls otherwise, or does not tell apart."""


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """Give families, and behind each that vLLM has as well the same under its name there."""
    for family in families:
        yield family
        own = family.name.removeprefix(_OWN)
        if own == _FINISHED:
            yield _finished(family)
        elif own in _NAMES:
            yield _renamed(family, f"vllm:{_NAMES[own]}")


def _renamed(family: Metric, name: str) -> Metric:
    made = Metric(name, family.documentation, family.type)
    made.samples = [
        each._replace(name=each.name.replace(family.name, name, 1), labels=each.labels | _ENGINE)
        for each in family.samples
    ]
    return made


def _finished(family: Metric) -> Metric:
    """Count requests by vLLM's reasons."""
    numbers: Counter[tuple[str, str]] = Counter()
    for each in family.samples:
        if each.name.endswith("_total"):
            reason = each.labels["finish_reason"]
            numbers[each.labels["model_name"], _REASONS.get(reason, reason)] += int(each.value)
    made = Metric("vllm:request_success", family.documentation, "counter")
    for (model, reason), number in numbers.items():
        labels = {"model_name": model, "finished_reason": reason} | _ENGINE
        made.add_sample("vllm:request_success_total", labels, number)
    return made


# ----------------------------------------------------------------------
# Families of metrics that services count themselves, together, as scrapers want them: each family once
# ----------------------------------------------------------------------


class ServiceMetrics:
    """A collector of the collectors of services, which come and go.

    Args:
        has_vllm_names: whether it gives what vLLM has under vLLM's names as well.
    """

    def __init__(self, *, has_vllm_names: bool = False) -> None:
        self._has_vllm_names = has_vllm_names
        self._services: list[tuple[str, Collectors]] = []

    @contextmanager
    def collecting(self, collectors: Collectors, name: str) -> Iterator[None]:
        """Show what the collectors give while the block lasts, with the label ``name`` unless that is empty."""
        entry = name, collectors
        self._services.append(entry)
        try:
            yield
        finally:
            self._services.remove(entry)

    def collect(self) -> Iterable[Metric]:
        """Give each family with the samples of all services."""
        families: dict[str, Metric] = {}
        for name, collectors in tuple(self._services):
            labels = {"name": name} if name else {}
            for found in (family for collector in collectors for family in collector.collect()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [each._replace(labels=labels | each.labels) for each in found.samples]
        return with_vllm_names(families.values()) if self._has_vllm_names else families.values()

    def restricted(self, families: Sequence[str]) -> RestrictedServiceMetrics:
        """Give the families of these names, or that have samples so called."""
        return RestrictedServiceMetrics(self, families)


class RestrictedServiceMetrics:
    """A collector of some families of services, which nobody knows by name before they are collected."""

    def __init__(self, metrics: ServiceMetrics, families: Sequence[str]) -> None:
        self._metrics = metrics
        self._families = frozenset(families)

    def collect(self) -> Iterable[Metric]:
        """Give them."""
        for family in self._metrics.collect():
            if {family.name, f"{family.name}_total"} & self._families:
                yield family


# ----------------------------------------------------------------------
# Prometheus metrics of one server: OVMS's families under OVMS's names, and a few of our own
# ----------------------------------------------------------------------

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_METHODS: Final = (
    ("ModelInfer", "KServe"),
    ("ModelMetadata", "KServe"),
    ("ModelReady", "KServe"),
    ("Predict", "TensorFlowServing"),
    ("GetModelMetadata", "TensorFlowServing"),
    ("GetModelStatus", "TensorFlowServing"),
)
"""What is counted of models from the moment when they are loaded."""
_GRAPH: Final = "graph"
_OF_NO_VERSION: Final = frozenset({"ModelReady", "GetModelStatus"})
_SUFFIXES: Final = ("", "_total", "_bucket", "_sum", "_count")
"""What the names of a family's samples end with."""
# The client library ends every counter's name in "_total"; dashboards made for OVMS ask for the bare names.
_TOTAL: Final = re.compile(rb"^((?:# (?:HELP|TYPE) )?ovms_[a-z_]+?)_total\b", re.MULTILINE)
_OPEN_TOTAL: Final = re.compile(rb"^(?:# TYPE (ovms_[a-z_]+) counter$|(ovms_[a-z_]+)_total\b)", re.MULTILINE)
"""In OpenMetrics's format the name of a counter must end so; a family of an unknown type may have any."""

CallsT = TypeVar("CallsT", bound="CallMetrics")


class _CallEnd(NamedTuple):
    """What counts calls of one version that end alike; ``times`` is empty for questions, which are not timed."""

    counters: tuple[Count, ...]
    times: tuple[Any, ...]


prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(Meters):
    """The metrics of one server; an observer of calls.

    Args:
        families: the OVMS families to serve, None for those that are on by default.
        own: the server's own families to serve, None for all of them.
        vllm_names: whether figures of models of text are told under vLLM's names, too.
    """

    def __init__(
        self, families: Iterable[str] | None = None, own: Iterable[str] | None = None, *, vllm_names: bool = False
    ) -> None:
        self.registry = CollectorRegistry()
        chosen = {f.name for f in FAMILIES.values() if f.default} if families is None else set(families)
        chosen |= set(OWN_FAMILIES if own is None else own)
        rows = [row for row in (*FAMILIES.values(), *OWN_FAMILIES.values()) if row.name in chosen]
        self._read = {row.name: row for row in rows if row.name in READ_FAMILIES}
        self._families: dict[str, Any] = {
            row.name: _make(row, self.registry) for row in rows if row.name not in READ_FAMILIES
        }
        self._kinds = cache(partial(self.child, "ovmstrio_request_time_us"))
        self._servables: dict[tuple[str, str], CallMetrics] = {}
        self._shown_of: dict[tuple[str, ...], set[tuple[Gauge, tuple[str, ...]]]] = {}
        self._graphs: dict[str, GraphMetrics] = {}
        self._dropped_lines = 0
        self.child("ovmstrio_dropped_log_lines")
        self._services = ServiceMetrics(has_vllm_names=vllm_names)
        self.registry.register(self._services)
        self._read_all(PROCESS_FIGURES)

    def watch(self, census: Census, turns: Callable[[], tuple[Sequence[int], float]]) -> None:
        """Show what runs beside the event loop, and how long the loop's turns take; see ``ReadSpread``."""
        self._read_all(work_figures(census))
        family = self._read.get(LOOP_DELAY)
        if family is not None:
            self.registry.register(ReadSpread(family, turns))

    def show(self, family: str, read: Callable[[], dict[tuple[str, ...], float]]) -> None:
        """Show figures that somebody else keeps, by their labels; they are read from any thread."""
        self._read_all({family: read})

    def _read_all(self, figures: Mapping[str, Callable[[], dict[tuple[str, ...], float]]]) -> None:
        for name in figures.keys() & self._read.keys():
            self.registry.register(ReadFigures(self._read[name], figures[name]))

    def limited(self, name: str, queued: Callable[[], int]) -> None:
        """Show how many requests of a service wait for a place, and that none was refused yet."""
        self.child("ovmstrio_queued_requests", name).set_function(queued)
        self.child("ovmstrio_refused_requests", name)

    def refused(self, reason: str) -> None:
        """Count a request that was refused because of who makes it."""
        self.child("ovmstrio_refused_callers", reason).inc()

    def collecting(self, collectors: Collectors, name: str) -> AbstractContextManager[None]:
        """Show what services count themselves; see ``ServiceMetrics.collecting``."""
        return self._services.collecting(collectors, name)

    def servable(self, name: str, version: str) -> ServableMetrics:
        """Give the metrics of one version, made at zero on first sight."""
        found = self._servables.get((name, version))
        if not isinstance(found, ServableMetrics):
            found = self._shown((name, version), ServableMetrics(self, name, version))
        return found

    def set_memory(self, name: str, version: str, part: str, size: int) -> None:
        """Say how many bytes the last load of one version of a service took for a part."""
        self.child("ovmstrio_memory_bytes", name, version, part).set(size)

    def graph(self, name: str) -> GraphMetrics:
        """Give the metrics of one graph, made at zero on first sight."""
        found = self._graphs.get(name)
        if found is None:
            found = self._graphs[name] = GraphMetrics(self, name)
        return found

    def node(self, name: str, node: str) -> NodeMetrics:
        """Give what records the runs of a node."""
        return NodeMetrics(self, name, node)

    def batches(self, name: str, version: str) -> BatchMetrics:
        """Give the metrics of the batches of one version of a service."""
        return BatchMetrics(self, name, version)

    def child(self, family: str, *labels: str) -> Any:
        """Give one bound child, or one that counts nothing where the family is off."""
        metric = self._families.get(family)
        if metric is None:
            return _OFF
        if isinstance(metric, Gauge):
            if not labels:
                return metric
            self._shown_of.setdefault(labels[:2], set()).add((metric, labels))
        return metric.labels(*labels)

    def call_started(self, event: CallEvent) -> None:
        """Count a call in."""
        if event.kind != _GRAPH and event.method not in QUESTIONS:
            found = self._servables.get((event.name, event.version)) or self._make_calls(event)
            found.in_flight += 1

    def call_moved(self, event: CallEvent, step: Step) -> None:
        """Count what moves in a stream of a graph."""
        if event.kind == _GRAPH:
            self.graph(event.name).moved(event, step)

    def call_finished(self, event: CallEvent) -> None:
        """Count a call out, by its outcome."""
        if event.kind == _GRAPH:
            if event.method not in QUESTIONS:
                self.of_kind(event).observe(event.seconds * _MICROSECONDS, event.trace_id)
            self.graph(event.name).ended(event)
        else:
            key = (event.name, event.version)
            # Of a version that was retired meanwhile, or only asked about, calls are counted and no gauge is made.
            (self._servables.get(key) or CallMetrics(self, *key)).ended(event)

    def of_kind(self, event: CallEvent) -> Any:
        """Give the times of all calls of services of a kind that come over one interface."""
        return self._kinds(event.kind, event.door.interface)

    def _make_calls(self, event: CallEvent) -> CallMetrics:
        """Make the metrics of the calls of one version, on first sight."""
        key = (event.name, event.version)
        return self._shown(key, (ServableMetrics if event.door.infer else CallMetrics)(self, *key))

    def _shown(self, key: tuple[str, str], made: CallsT) -> CallsT:
        """Keep the metrics of one version, and show how many calls are in flight."""
        self._servables[key] = made
        self.child("ovms_current_requests", *key).set_function(lambda: made.in_flight)
        return made

    def retired(self, name: str, version: str) -> None:
        """Show nothing any more that a version has or does now, for it is gone; what was counted of it stays.

        A thousand of them may end in one turn of the event loop, and so nothing of others is looked at.
        """
        self._servables.pop((name, version), None)
        for gauge, labels in self._shown_of.pop((name, version), ()):
            gauge.remove(*labels)

    def render(self, families: Sequence[str] = (), *, is_open: bool = False) -> bytes:
        """Print every family, or those named; from any thread, but one at a time.

        Args:
            families: their names; none for all.
            is_open: whether that is OpenMetrics's text format, which has exemplars, or Prometheus's.
        """
        dropped = WRITER.dropped
        self.child("ovmstrio_dropped_log_lines").inc(dropped - self._dropped_lines)
        self._dropped_lines = dropped
        names = [f"{family}{suffix}" for family in families for suffix in _SUFFIXES]
        source: Any = self.registry
        if names:
            source = _Joined(self.registry.restricted_registry(names), self._services.restricted(families))
        if is_open:
            text: bytes = generate_open(source)  # type: ignore[no-untyped-call]
            return _OPEN_TOTAL.sub(_named_as_ovms, text)
        return _TOTAL.sub(rb"\1", generate_latest(source))


class NodeMetrics(NodeHooks):
    """The metrics of one node; its failures are told from when it is loaded, its times once there are any."""

    def __init__(self, metrics: Metrics, name: str, node: str) -> None:
        self._child = metrics.child
        self._labels = (name, node)
        self._failures = metrics.child("ovmstrio_node_failures", name, node)

    @cached_property
    def _times(self) -> Any:
        return self._child("ovmstrio_node_time_us", *self._labels)

    def ran(self, seconds: float) -> None:
        """Record how long a run took."""
        self._times.observe(seconds * _MICROSECONDS)

    def failed(self) -> None:
        """Count a run that failed."""
        self._failures.inc()


class BatchMetrics(BatchHooks):
    """The metrics of the batches of one version of one servable, which are there once there is a batch."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (name, version)

    @cached_property
    def _batches(self) -> tuple[Any, Any]:
        child = self._metrics.child
        return child("ovmstrio_batch_size", *self._labels), child("ovmstrio_batch_wait_time_us", *self._labels)

    def batch_size(self, size: int) -> None:
        """Record how many rows a batch has."""
        self._batches[0].observe(size)

    def queue_time(self, seconds: float) -> None:
        """Record how long a request waited for its batch."""
        self._batches[1].observe(seconds * _MICROSECONDS)


class CallMetrics(BatchMetrics):
    """The bound metrics of the calls of one version of one service, which are there once it was called."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        super().__init__(metrics, name, version)
        self._ends: dict[tuple[str, Door, str, str], _CallEnd] = {}
        self.in_flight = 0

    def ended(self, event: CallEvent) -> None:
        """Count a call that has ended."""
        key = (event.kind, event.door, event.method, event.code)
        end = self._ends.get(key)
        if end is None:
            end = self._ends[key] = self._bind_end(event)
        for counter in end.counters:
            counter.number += 1
        if end.times:
            self.in_flight -= 1
            taken = event.seconds * _MICROSECONDS
            for times in end.times:
                times.observe(taken, event.trace_id)

    def _bind_end(self, event: CallEvent) -> _CallEnd:
        """Look up, on first sight, all that counts calls that end alike."""
        interface = event.door.interface
        counted = self._outcome(event.method, event.door.api, interface, event.code)
        counters = tuple(each for each in counted if isinstance(each, Count))
        if event.method in QUESTIONS:
            return _CallEnd(counters, ())
        own = self._metrics.child("ovms_request_time_us", *self._labels, interface)
        return _CallEnd(counters, (self._metrics.of_kind(event), own))

    def _outcome(self, method: str, api: str, interface: str, code: str) -> tuple[Any, Any]:
        name, version = self._labels
        labels = (name, "" if method in _OF_NO_VERSION else version, api, method, interface)
        family = "ovms_requests_success" if code == OK else "ovms_requests_fail"
        child = self._metrics.child
        return child(family, *labels), child("ovmstrio_requests", *labels, code)


class ServableMetrics(CallMetrics, ServableHooks):
    """The bound metrics of one version of one model, at zero from the start."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        super().__init__(metrics, name, version)
        self._pool: tuple[int, int] | None = None
        # Histograms have dozens of lines, and are there once there is something in them.
        self._inference: Any = None
        self._wait: Any = None
        for (method, api), interface in product(_METHODS, _INTERFACES):
            for code in (OK, "InvalidRequest"):
                self._outcome(method, api, interface, code)

    def inferred(self, waited: float, seconds: float) -> None:
        """Record how long the runtime took for one inference, and how long its request waited for its place there."""
        if self._inference is None:
            child = self._metrics.child
            self._inference = child("ovms_inference_time_us", *self._labels)
            self._wait = child("ovms_wait_for_infer_req_time_us", *self._labels)
        self._inference.observe(seconds * _MICROSECONDS)
        self._wait.observe(waited * _MICROSECONDS)

    def set_streams(self, streams: int) -> None:
        """Say how many streams the model was compiled with."""
        self._metrics.child("ovms_streams", *self._labels).set(streams)

    def set_pool(self, size: int, active: int) -> None:
        """Say how large the pool is and how much of it is at work."""
        if self._pool is None:
            child = self._metrics.child
            child("ovms_infer_req_queue_size", *self._labels).set_function(lambda: self._in_pool(0))
            child("ovms_infer_req_active", *self._labels).set_function(lambda: self._in_pool(1))
        self._pool = (size, active)

    def _in_pool(self, which: int) -> int:
        return (self._pool or (0, 0))[which]

    def placed(self, *, inline: bool, moved: bool) -> None:
        """Say where inferences run, and count that they changed their place."""
        self._metrics.child("ovmstrio_inline", *self._labels).set(inline)
        moves = self._metrics.child("ovmstrio_placement_moves", *self._labels)
        if moved:
            moves.inc()

    def bound(self, *, to_cores: bool, again: bool) -> None:
        """Say whether threads are bound to cores, and count that this was chosen anew."""
        self._metrics.child("ovmstrio_bound_to_cores", *self._labels).set(to_cores)
        choices = self._metrics.child("ovmstrio_core_choices", *self._labels)
        if again:
            choices.inc()

    @cached_property
    def _buckets(self) -> tuple[dict[str, Any], Any, Any]:
        """Only models with buckets have them."""
        child = self._metrics.child
        fits = {fit: child("ovmstrio_bucketed_inferences", *self._labels, fit) for fit in ("exact", "padded", "larger")}
        given, added = (child("ovmstrio_bucketed_elements", *self._labels, part) for part in ("request", "padding"))
        return fits, given, added

    def bucketed(self, fit: str, given: int, added: int) -> None:
        """Count an inference by how it fitted the buckets, and how much of its inputs is padding."""
        fits, of_requests, of_padding = self._buckets
        fits[fit].inc()
        of_requests.inc(given)
        of_padding.inc(added)

    def set_load_seconds(self, seconds: float) -> None:
        """Say how long the version took to load."""
        self._metrics.child("ovmstrio_model_load_seconds", *self._labels).set(seconds)

    def set_memory(self, part: str, size: int) -> None:
        """Say how many bytes of a part the version has."""
        self._metrics.set_memory(*self._labels, part, size)


def _named_as_ovms(found: re.Match[bytes]) -> bytes:
    """Give the line of a family's type, or a sample's name, under the name that scrapers know of OVMS."""
    return b"# TYPE %b unknown" % found[1] if found[1] else found[2]


class _Joined:
    """Collectors one after the other."""

    def __init__(self, *collectors: Any) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Any]:
        """Give the families of each."""
        return chain.from_iterable(each.collect() for each in self._collectors)


class _Off:
    """A metric that is not served."""

    def inc(self, amount: Any = 1, trace_id: str = "") -> None:
        """Record nothing."""

    dec = set = set_function = observe = inc


_OFF: Final = _Off()


def _make(row: Family, registry: CollectorRegistry) -> Gauge | Counts | Spreads:
    if row.kind == "gauge":
        return Gauge(row.name, row.help, row.labels, registry=registry)
    made = (Counts if row.kind == "counter" else Spreads)(row)
    registry.register(made)
    return made
