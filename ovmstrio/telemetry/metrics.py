"""Prometheus metrics of the server: OVMS's families and its own.

Counters of a servable are created at zero when it is loaded and bound once, so that counting needs no label lookup.
Histograms, with dozens of lines each, are created on the first value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain, product
from time import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import prometheus_client
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.utils import floatToGoString

from ovmstrio.core.errors import (
    CallerLimited,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    VersionMissing,
    VersionRetired,
)
from ovmstrio.core.events import CANCELLED, OK, QUERY_METHODS, StreamProgress
from ovmstrio.core.hooks import BatchHooks, Collectors, GraphHooks, Meters, NodeHooks, ServableHooks
from ovmstrio.core.metric_families import FAMILIES, LOOP_DELAY, OWN_FAMILIES, SCRAPED_FAMILIES, selected_families
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.telemetry.process_metrics import PROCESS_METRICS, resource_metrics
from ovmstrio.util.deprecation import OLD_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.events import ApiInterface, CallEvent
    from ovmstrio.core.metric_families import Family
    from ovmstrio.core.resource_registry import ResourceRegistry
    from ovmstrio.util.deprecation import OldMetric

# Metric children, updated on the event loop only and read by any thread.  Those of prometheus_client take a lock per
# update, and its text takes ten times the CPU.


class FastCounter:
    """A counter."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def inc(self, amount: int = 1) -> None:
        """Increase the counter."""
        self.number += amount

    def read(self) -> float:
        """Return the value."""
        return self.number


class FastGauge:
    """A gauge; ``set_function`` replaces the stored value."""

    __slots__ = ("_function", "_number")

    def __init__(self) -> None:
        self._number: float = 0
        self._function: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Set the value."""
        self._number = value

    def inc(self, amount: float = 1) -> None:
        """Increase the value."""
        self._number += amount

    def dec(self, amount: float = 1) -> None:
        """Decrease the value."""
        self._number -= amount

    def set_function(self, function: Callable[[], float]) -> None:
        """Read the value from a function at each scrape."""
        self._function = function

    def read(self) -> float:
        """Return the value."""
        return self._number if self._function is None else self._function()


class FastHistogram:
    """A histogram.

    Attributes:
        numbers: number of values per bucket.
        total: sum of the values.
        exemplars: last exemplar per bucket; None while there are none.
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
            self.exemplars[bucket] = Exemplar(trace_id, value, time())

    @classmethod
    def of(cls, numbers: Sequence[int], total: float) -> FastHistogram:
        """Return a histogram of values that were counted elsewhere."""
        made = cls(())
        made.numbers, made.total = list(numbers), total
        return made

    def read(self) -> FastHistogram:
        """Return the histogram, as the value of its sample."""
        return self


class Exemplar(NamedTuple):
    """Value of a traced call; ``at`` is its time in seconds since the epoch."""

    trace_id: str
    value: float
    at: float


Samples: TypeAlias = "Sequence[tuple[tuple[str, ...], float | FastHistogram]]"
"""Values by labels."""


class MetricFamily:
    """Metric children of one family by their labels."""

    def __init__(self, row: Family) -> None:
        self.row = row
        self._create: Callable[[], Any] = partial(FastHistogram, row.buckets)
        if row.kind != "histogram":
            self._create = FastCounter if row.kind == "counter" else FastGauge
        self._children: dict[tuple[str, ...], Any] = {}

    def labels(self, *values: str) -> Any:
        """Return the child with these labels, created at zero."""
        return self._children.get(values) or self._children.setdefault(values, self._create())

    def remove(self, *values: str) -> None:
        """Remove the child with these labels."""
        self._children.pop(values, None)

    def samples(self) -> Samples:
        """Return the current values."""
        return [(labels, child.read()) for labels, child in tuple(self._children.items())]


class ScrapedFamily:
    """Family whose values ``read`` returns at scrape time, in any thread."""

    def __init__(self, row: Family, read: Callable[[], Mapping[tuple[str, ...], float | FastHistogram]]) -> None:
        self.row = row
        self._read = read

    def samples(self) -> Samples:
        """Return the current values."""
        return tuple(self._read().items())


# Exposition formats

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_LARGE: Final = 1_000_000
"""Prometheus writes larger numbers with an exponent."""


def render_family(row: Family, samples: Samples, *, is_open: bool) -> list[str]:
    """Return the lines of a family in Prometheus's or OpenMetrics's format, labels in alphabetical order.

    Counters of OVMS have no suffix ``_total``, as its dashboards query the bare names.  OpenMetrics requires the suffix
    for counters; families of type ``unknown`` may have any name.
    """
    is_counter, is_bare = row.kind == "counter", row.name.startswith("ovms_")
    name = f"{row.name}_total" if is_counter and not is_bare else row.name
    kind = "unknown" if is_open and is_counter and is_bare else row.kind
    shown = row.name if is_open else name
    lines = [f"# HELP {shown} {row.help}", f"# TYPE {shown} {kind}"]
    names = [*row.labels, *(("le",) if row.kind == "histogram" else ())]
    order = sorted(range(len(names)), key=names.__getitem__)
    for values, value in samples:
        escaped = [each.translate(_ESCAPES) for each in values]
        if not isinstance(value, FastHistogram):
            labels = ",".join([f'{names[at]}="{escaped[at]}"' for at in order])
            lines.append(f"{name}{{{labels}}} {_number(value)}" if labels else f"{name} {_number(value)}")
            continue
        pairs = [f'{names[at]}="{escaped[at]}"' if at < len(escaped) else "" for at in order]
        at_bound = pairs.index("")
        before = "".join(f"{each}," for each in pairs[:at_bound])
        after = "".join(f",{each}" for each in pairs[at_bound + 1 :])
        lines += _render_histogram(row, value, f'{name}_bucket{{{before}le="', f'"{after}}} ', is_open=is_open)
        labels = ",".join(filter(None, pairs))
        labels = f"{{{labels}}}" if labels else ""
        count = lines[-1].partition(" # ")[0].rpartition(" ")[2]
        lines += (f"{name}_count{labels} {count}", f"{name}_sum{labels} {_number(value.total)}")
    return lines


def _render_histogram(row: Family, value: FastHistogram, before: str, after: str, *, is_open: bool) -> list[str]:
    counts = accumulate(value.numbers)
    bounds = [*map(floatToGoString, row.buckets), "+Inf"]
    lines = [
        f"{before}{bound}{after}{count}.0" if count < _LARGE else f"{before}{bound}{after}{_number(count)}"
        for bound, count in zip(bounds, counts, strict=True)
    ]
    if is_open:
        for bucket, each in tuple((value.exemplars or {}).items()):
            lines[bucket] += f' # {{trace_id="{each.trace_id}"}} {_number(each.value)} {each.at}'
    return lines


def _number(value: float) -> str:
    if type(value) is int and abs(value) < _LARGE:
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


# Earlier names of families


def render_with_old_name(
    row: Family, read: Callable[[], Samples], wanted: Container[str], *, is_open: bool
) -> list[str]:
    """Return the lines of a family under its name and its earlier name, as far as these are ``wanted``."""
    old = OLD_METRICS.get(row.name)
    has_old = old is not None and old.name in wanted
    samples = read() if has_old or row.name in wanted else ()
    lines = render_family(row, samples, is_open=is_open) if row.name in wanted else []
    if old is not None and has_old:
        lines += render_family(*_with_old_name(old, row, samples), is_open=is_open)
    return lines


def _with_old_name(old: OldMetric, row: Family, samples: Samples) -> tuple[Family, Samples]:
    kept = [at for at, label in enumerate(row.labels) if label not in old.of]
    of = [(at, old.of[label]) for at, label in enumerate(row.labels) if label in old.of]
    family = replace(
        row,
        name=old.name,
        labels=tuple(row.labels[at] for at in kept),
        help=f"Deprecated, use {row.name}.",
        buckets=tuple(round(bound * old.scale, 3) for bound in row.buckets),
    )
    scaled = [
        (tuple(labels[at] for at in kept), _scaled(value, old.scale))
        for labels, value in samples
        if all(labels[at] == wanted for at, wanted in of)
    ]
    return family, scaled


def _scaled(value: float | FastHistogram, scale: float) -> float | FastHistogram:
    if scale == 1:
        return value
    if not isinstance(value, FastHistogram):
        return value * scale
    return FastHistogram.of(value.numbers, value.total * scale)


# Graphs

_STREAM: Final = "ModelInferStream"
_RUN: Final = ("ModelInfer", _STREAM)
_INFER: Final = (*((method, "KServe") for method in _RUN), ("Predict", "TensorFlowServing"))
_QUERIES: Final = (
    ("ModelMetadata", "KServe"),
    ("ModelReady", "KServe"),
    ("GetModelMetadata", "TensorFlowServing"),
    ("GetModelStatus", "TensorFlowServing"),
)
_INTERFACES: Final = ("gRPC", "REST")
_FAMILIES: Final = ("ovms_requests_accepted", "ovms_requests_rejected", "ovms_responses", "ovms_graph_error")
_MICROSECONDS: Final = 1e6
_FAMILY_OF: Final = {
    StreamProgress.ACCEPTED: "ovms_requests_accepted",
    StreamProgress.REJECTED: "ovms_requests_rejected",
    StreamProgress.ANSWERED: "ovms_responses",
}


class GraphMetrics(GraphHooks):
    """Bound metrics of one graph: instances and calls.

    Graph instances run for ``ModelInfer`` or ``ModelInferStream`` only.
    """

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._name = name
        self._child = metrics.child
        self._node_of = metrics.node
        self._current: Any = _NO_METRIC
        self._seconds = {method: metrics.child("ovms_graph_processing_time_us", name, method) for method in _RUN}
        self._counter = cache(lambda family, *labels: metrics.child(family, name, *labels))
        self._outcome = cache(self._bind_outcome)
        for family, (method, api), interface in product(_FAMILIES, _INFER, _INTERFACES):
            self._counter(family, api, method, interface)
        for (method, api), interface in product(_QUERIES, _INTERFACES):
            for family in ("ovms_requests_success", "ovms_requests_fail"):
                self._child(family, name, "", api, method, interface)

    def expose(self) -> None:
        """Create the gauge of running instances, at zero, unless it exists."""
        self._current = self._child("ovms_current_graphs", self._name)

    def started(self) -> None:
        """Count a started instance."""
        self._current.inc()

    def finished(self, method: str, seconds: float, *, ok: bool) -> None:
        """Count a finished instance; as in OVMS, failed instances have no run time."""
        self._current.dec()
        if ok:
            self._seconds[method].observe(seconds * _MICROSECONDS)

    def node(self, node: str) -> NodeHooks:
        """Return the hooks of a node."""
        return self._node_of(self._name, node)

    def stream_progressed(self, event: CallEvent, step: StreamProgress) -> None:
        """Count an accepted or rejected request, or a response; on streams, every message."""
        self._count(_FAMILY_OF[step], event)

    def ended(self, event: CallEvent) -> None:
        """Count a finished call by outcome; graph inference is not counted in the model families."""
        for counter in self._outcome(event.method, event.api_interface.api, event.api_interface.interface, event.code):
            counter.inc()
        if event.method == _STREAM:
            if isinstance(event.error, ServerError):
                self._count("ovms_graph_error", event)
        elif event.method not in QUERY_METHODS:
            self._count_call(event)

    def _count_call(self, event: CallEvent) -> None:
        is_refused = isinstance(event.error, InvalidRequest | FailedPrecondition)
        self._count("ovms_requests_rejected" if is_refused else "ovms_requests_accepted", event)
        if event.code == OK:
            self._count("ovms_responses", event)
        elif event.is_read and event.code != CANCELLED:
            self._count("ovms_graph_error", event)

    def _count(self, family: str, event: CallEvent) -> None:
        self._counter(family, event.api_interface.api, event.method, event.api_interface.interface).inc()

    def _bind_outcome(self, method: str, api: str, interface: str, code: str) -> tuple[Any, ...]:
        labels = (self._name, "", api, method, interface)
        requests = self._child("ovmstrio_requests", *labels, code)
        if method not in QUERY_METHODS:
            return (requests,)
        return requests, self._child("ovms_requests_success" if code == OK else "ovms_requests_fail", *labels)


# vLLM aliases of text-model metrics

_OWN: Final = "ovmstrio_llm_"
_ENGINE: Final = {"engine": "0"}
"""vLLM's label for the engine index."""

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
"""Families that differ by name only."""

_FINISHED: Final = "requests_finished"
_REASONS: Final[Mapping[str, str]] = {"tool_calls": "stop", "cancelled": "abort"}
"""Finish reasons with another name in vLLM."""


def _aliases(family: Metric, *, has_vllm_names: bool) -> Iterator[Metric]:
    """Yield a family under its earlier name and, if requested, under its name in vLLM."""
    old = OLD_METRICS.get(family.name)
    if old is not None:
        yield _renamed(family, old.name, {}, old.scale)
    if has_vllm_names:
        own = family.name.removeprefix(_OWN)
        if own == _FINISHED:
            yield _finished(family)
        elif own in _NAMES:
            yield _renamed(family, f"vllm:{_NAMES[own]}", _ENGINE)


def _renamed(family: Metric, name: str, labels: Mapping[str, str], scale: float = 1.0) -> Metric:
    """Return a family with another name and more labels; ``scale`` is for counters."""
    made = Metric(name, family.documentation, family.type)
    made.samples = [
        each._replace(
            name=each.name.replace(family.name, name, 1),
            labels={**each.labels, **labels},
            value=each.value if each.name.endswith("_created") else each.value * scale,
        )
        for each in family.samples
    ]
    return made


def _finished(family: Metric) -> Metric:
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


# Metrics of user code and services


class ServiceMetrics:
    """Collector that merges the collectors of services into one sample list per family."""

    def __init__(self, *, has_vllm_names: bool = False) -> None:
        self._has_vllm_names = has_vllm_names
        self._services: list[tuple[str, Collectors]] = []

    @contextmanager
    def collecting(self, collectors: Collectors, name: str) -> Iterator[None]:
        """Include collectors within the block, with the label ``name`` unless that is empty."""
        entry = name, collectors
        self._services.append(entry)
        try:
            yield
        finally:
            self._services.remove(entry)

    def collect(self) -> Iterable[Metric]:
        """Return the families with the samples of all services."""
        families: dict[str, Metric] = {}
        for name, collectors in tuple(self._services):
            labels = {"name": name} if name else {}
            for found in (family for collector in collectors for family in collector.collect()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [each._replace(labels=labels | each.labels) for each in found.samples]
        has_vllm_names = self._has_vllm_names
        aliases = ((each, *_aliases(each, has_vllm_names=has_vllm_names)) for each in families.values())
        return chain.from_iterable(aliases)

    def restricted(self, families: Container[str]) -> RestrictedServiceMetrics:
        """Return a collector of the named families only."""
        return RestrictedServiceMetrics(self, families)


class RestrictedServiceMetrics:
    """Collector of selected service families, whose names are known only after collection."""

    def __init__(self, metrics: ServiceMetrics, families: Container[str]) -> None:
        self._metrics = metrics
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the selected families."""
        return (family for family in self._metrics.collect() if family.name in self._families)


# Server metrics

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
"""Counters that exist from the load of a model."""
_GRAPH: Final = "graph"
_METHODS_WITHOUT_VERSION: Final = frozenset({"ModelReady", "GetModelStatus"})
_QUEUE_FULL: Final = "queue_full"
_AUTH_REASONS: Final = {
    "nothing_shown": "unauthenticated", "not_known": "unauthenticated", "scope": "forbidden", "limit": "over_quota"
}  # fmt: skip
_REASONS_OF_ERRORS: Final[Mapping[type, str]] = {
    CallerLimited: "over_quota",
    NotFound: "unknown_name",
    NotReady: "not_loaded",
    Overloaded: _QUEUE_FULL,
    PayloadTooLarge: "too_large",
    VersionMissing: "not_loaded",
    VersionRetired: "not_loaded",
}
"""Reasons of rejections, by error class; the nearest base class counts."""
CallsT = TypeVar("CallsT", bound="CallMetrics")


class _CallEnd(NamedTuple):
    """Metrics for calls with the same end; queries are not timed."""

    counters: tuple[FastCounter, ...]
    seconds: Any = None
    microseconds: Any = None


prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(Meters):
    """Metrics of one server; an observer of calls.

    Args:
        families: enabled OVMS families; None for the default ones.
        own: enabled ``ovmstrio_*`` and ``process_*`` families; None for all.
        vllm_names: whether text-model metrics have vLLM aliases.
    """

    def __init__(
        self, families: Iterable[str] | None = None, own: Iterable[str] | None = None, *, vllm_names: bool = False
    ) -> None:
        chosen = {f.name for f in FAMILIES.values() if f.default} if families is None else set(families)
        chosen |= set(OWN_FAMILIES if own is None else own)
        rows = [row for row in (*FAMILIES.values(), *OWN_FAMILIES.values()) if row.name in chosen]
        self._chosen = {row.name: row for row in rows}
        self._families = {row.name: MetricFamily(row) for row in rows if row.name not in SCRAPED_FAMILIES}
        self._scraped: dict[str, ScrapedFamily] = {}
        self._kind_times = cache(partial(self.child, "ovmstrio_request_time_seconds"))
        self._servables: dict[tuple[str, str], CallMetrics] = {}
        self._gauges_of: dict[tuple[str, ...], set[tuple[MetricFamily, tuple[str, ...]]]] = {}
        self._graphs: dict[str, GraphMetrics] = {}
        self._dropped_lines = 0
        for name in ("ovmstrio_dropped_log_lines", "ovmstrio_ready"):
            self.child(name)
        self._services = ServiceMetrics(has_vllm_names=vllm_names)
        for name, read in PROCESS_METRICS.items():
            self.register_gauge(name, read)

    def expose_resources(
        self, registry: ResourceRegistry, iterations: Callable[[], tuple[Sequence[int], float]]
    ) -> None:
        """Expose resources of the registry, and the numbers of event-loop iterations by duration with their sum."""
        for name, read in resource_metrics(registry).items():
            self.register_gauge(name, read)
        self.register_gauge(LOOP_DELAY, lambda: {(): FastHistogram.of(*iterations())})

    def register_gauge(self, family: str, read: Callable[[], Mapping[tuple[str, ...], float | FastHistogram]]) -> None:
        """Expose values that ``read`` returns by labels; called from any thread."""
        if family in self._chosen:
            self._scraped[family] = ScrapedFamily(self._chosen[family], read)

    def add_limited_service(self, name: str, queued: Callable[[], int]) -> None:
        """Create the queue metrics of a service with a concurrency limit."""
        self.child("ovmstrio_queued_requests", name).set_function(queued)
        self.child("ovmstrio_rejected_requests", name, _QUEUE_FULL)

    def refused(self, reason: str) -> None:
        """Count a request rejected by authentication or authorisation."""
        self.child("ovmstrio_auth_failures", reason).inc()
        self.child("ovmstrio_rejected_requests", "", _AUTH_REASONS.get(reason, reason)).inc()

    def rejected(self, error: ServerError, name: str = "") -> None:
        """Count a request that was rejected before it reached its service; ``name`` is empty for unknown services."""
        reason = next((_REASONS_OF_ERRORS[each] for each in type(error).__mro__ if each in _REASONS_OF_ERRORS), None)
        if reason is not None:
            self.child("ovmstrio_rejected_requests", name, reason).inc()

    def unreachable(self, name: str) -> None:
        """Count a call to a remote model that no server answered."""
        self.child("ovmstrio_remote_unreachable_calls", name).inc()

    def collecting(self, collectors: Collectors, name: str) -> AbstractContextManager[None]:
        """Expose user collectors; see ``ServiceMetrics.collecting``."""
        return self._services.collecting(collectors, name)

    def servable(self, name: str, version: str) -> ServableMetrics:
        """Return the metrics of one model version, created on first use."""
        found = self._servables.get((name, version))
        if not isinstance(found, ServableMetrics):
            found = self._add_version((name, version), ServableMetrics(self, name, version))
        return found

    def set_memory(self, name: str, version: str, part: str, size: int) -> None:
        """Set the memory in bytes of one part of a version's last load."""
        self.child("ovmstrio_memory_bytes", name, version, part).set(size)

    def graph(self, name: str) -> GraphMetrics:
        """Return the metrics of one loaded graph, created on first use."""
        found = self._calls_of_graph(name)
        found.expose()
        return found

    def _calls_of_graph(self, name: str) -> GraphMetrics:
        """Return the metrics of one graph; removed or merely queried graphs get counters but no gauge."""
        found = self._graphs.get(name)
        if found is None:
            found = self._graphs[name] = GraphMetrics(self, name)
        return found

    def node(self, name: str, node: str) -> NodeMetrics:
        """Return the metrics of one node."""
        return NodeMetrics(self, name, node)

    def batches(self, name: str, version: str) -> BatchMetrics:
        """Return the batch metrics of one service version."""
        return BatchMetrics(self, name, version)

    def child(self, family: str, *labels: str) -> Any:
        """Return a bound child, or a no-op if the family is disabled."""
        metric = self._families.get(family)
        if metric is None:
            return _NO_METRIC
        if labels and metric.row.kind == "gauge":
            self._gauges_of.setdefault(labels[:2], set()).add((metric, labels))
        return metric.labels(*labels)

    def call_started(self, event: CallEvent) -> None:
        """Count a started call."""
        if event.kind != _GRAPH and event.method not in QUERY_METHODS:
            found = self._servables.get((event.name, event.version)) or self._make_calls(event)
            found.in_flight += 1

    def call_moved(self, event: CallEvent, step: StreamProgress) -> None:
        """Count stream progress of a graph."""
        if event.kind == _GRAPH:
            self._calls_of_graph(event.name).stream_progressed(event, step)

    def call_finished(self, event: CallEvent) -> None:
        """Count a finished call by outcome."""
        if event.kind == _GRAPH:
            if event.method not in QUERY_METHODS:
                self.kind_latency(event).observe(event.seconds, event.trace_id)
            self._calls_of_graph(event.name).ended(event)
        else:
            key = (event.name, event.version)
            # Retired or merely queried versions get counters but no gauge.
            (self._servables.get(key) or CallMetrics(self, *key)).ended(event)

    def kind_latency(self, event: CallEvent) -> Any:
        """Return the latency histogram of a service kind and interface."""
        return self._kind_times(event.kind, event.api_interface.interface)

    def _make_calls(self, event: CallEvent) -> CallMetrics:
        key = (event.name, event.version)
        return self._add_version(key, (ServableMetrics if event.api_interface.infer else CallMetrics)(self, *key))

    def _add_version(self, key: tuple[str, str], made: CallsT) -> CallsT:
        self._servables[key] = made
        self.child("ovms_current_requests", *key).set_function(lambda: made.in_flight)
        return made

    def retired(self, name: str, version: str) -> None:
        """Remove the gauges of an unloaded version and keep its counters.

        Must not iterate over other versions: a thousand versions may be unloaded in one event-loop iteration.
        """
        self._servables.pop((name, version), None)
        self._remove_gauges(name, version)

    def removed(self, name: str) -> None:
        """Remove the gauges of a service that is neither configured nor loaded any more, and keep its counters."""
        self._remove_gauges(name)

    def _remove_gauges(self, *labels: str) -> None:
        for gauge, values in self._gauges_of.pop(labels, ()):
            gauge.remove(*values)

    def render(self, families: Sequence[str] = (), *, is_open: bool = False) -> bytes:
        """Render metrics as text; any thread, one at a time.

        Args:
            families: names of families; empty for all.
            is_open: OpenMetrics format with exemplars instead of Prometheus text format.
        """
        dropped = WRITER.dropped
        self.child("ovmstrio_dropped_log_lines").inc(dropped - self._dropped_lines)
        self._dropped_lines = dropped
        wanted = selected_families(families) or _Everything()
        lines: list[str] = []
        collected: tuple[MetricFamily | ScrapedFamily, ...] = (*self._families.values(), *self._scraped.values())
        for family in collected:
            lines += render_with_old_name(family.row, family.samples, wanted, is_open=is_open)
        generate = generate_open if is_open else generate_latest
        own: bytes = generate(self._services.restricted(wanted))
        # Names of files, which services may have, may not be UTF-8.
        return "".join(f"{line}\n" for line in lines).encode(errors="replace") + own


class NodeMetrics(NodeHooks):
    """Metrics of one node; failures from the start, run times from the first run."""

    def __init__(self, metrics: Metrics, name: str, node: str) -> None:
        self._child = metrics.child
        self._labels = (name, node)
        self._failures = metrics.child("ovmstrio_node_failures", name, node)

    @cached_property
    def _times(self) -> Any:
        return self._child("ovmstrio_node_time_seconds", *self._labels)

    def ran(self, seconds: float) -> None:
        """Record a run time."""
        self._times.observe(seconds)

    def failed(self) -> None:
        """Count a failed run."""
        self._failures.inc()


class BatchMetrics(BatchHooks):
    """Batch metrics of one service version, created with the first batch."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (name, version)

    @cached_property
    def _batches(self) -> tuple[Any, Any]:
        child = self._metrics.child
        return child("ovmstrio_batch_size", *self._labels), child("ovmstrio_batch_wait_time_seconds", *self._labels)

    def batch_size(self, size: int) -> None:
        """Record a batch size."""
        self._batches[0].observe(size)

    def queue_time(self, seconds: float) -> None:
        """Record a wait for a batch."""
        self._batches[1].observe(seconds)


class CallMetrics(BatchMetrics):
    """Call metrics of one service version, created with the first call."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        super().__init__(metrics, name, version)
        self._ends: dict[tuple[str, ApiInterface, str, str], _CallEnd] = {}
        self.in_flight = 0

    def ended(self, event: CallEvent) -> None:
        """Count a finished call."""
        key = (event.kind, event.api_interface, event.method, event.code)
        end = self._ends.get(key)
        if end is None:
            end = self._ends[key] = self._bind_end(event)
        for counter in end.counters:
            counter.number += 1
        if end.seconds is not None:
            self.in_flight -= 1
            end.seconds.observe(event.seconds, event.trace_id)
            end.microseconds.observe(event.seconds * _MICROSECONDS, event.trace_id)

    def _bind_end(self, event: CallEvent) -> _CallEnd:
        interface = event.api_interface.interface
        counted = self._outcome(event.method, event.api_interface.api, interface, event.code)
        counters = tuple(each for each in counted if isinstance(each, FastCounter))
        if event.method in QUERY_METHODS:
            return _CallEnd(counters)
        own = self._metrics.child("ovms_request_time_us", *self._labels, interface)
        return _CallEnd(counters, self._metrics.kind_latency(event), own)

    def _outcome(self, method: str, api: str, interface: str, code: str) -> tuple[Any, Any]:
        labels = _request_labels(*self._labels, method, api, interface)
        family = "ovms_requests_success" if code == OK else "ovms_requests_fail"
        child = self._metrics.child
        return child(family, *labels), child("ovmstrio_requests", *labels, code)


class ServableMetrics(CallMetrics, ServableHooks):
    """Metrics of one model version; counters start at zero."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        super().__init__(metrics, name, version)
        self._pool: tuple[int, int] | None = None
        self._inference: Any = None
        self._wait: Any = None
        for (method, api), interface in product(_METHODS, _INTERFACES):
            for family in ("ovms_requests_success", "ovms_requests_fail"):
                metrics.child(family, *_request_labels(name, version, method, api, interface))

    def inferred(self, waited: float, seconds: float) -> None:
        """Record the time of one inference and its wait for an infer request."""
        if self._inference is None:
            child = self._metrics.child
            self._inference = child("ovms_inference_time_us", *self._labels)
            self._wait = child("ovms_wait_for_infer_req_time_us", *self._labels)
        self._inference.observe(seconds * _MICROSECONDS)
        self._wait.observe(waited * _MICROSECONDS)

    def set_streams(self, streams: int) -> None:
        """Set the number of execution streams."""
        self._metrics.child("ovms_streams", *self._labels).set(streams)

    def set_pool(self, size: int, active: int) -> None:
        """Set the size of the infer-request pool and the requests in use."""
        if self._pool is None:
            child = self._metrics.child
            child("ovms_infer_req_queue_size", *self._labels).set_function(lambda: self._in_pool(0))
            child("ovms_infer_req_active", *self._labels).set_function(lambda: self._in_pool(1))
        self._pool = (size, active)

    def _in_pool(self, which: int) -> int:
        return (self._pool or (0, 0))[which]

    def set_execution_mode(self, *, inline: bool, changed: bool) -> None:
        """Record whether inferences run on the event loop."""
        self._metrics.child("ovmstrio_inference_on_loop", *self._labels).set(inline)
        moves = self._metrics.child("ovmstrio_execution_switches", *self._labels)
        if changed:
            moves.inc()

    def set_cpu_pinning(self, *, to_cores: bool, changed: bool) -> None:
        """Record whether threads are pinned to cores."""
        self._metrics.child("ovmstrio_cpu_pinned", *self._labels).set(to_cores)
        choices = self._metrics.child("ovmstrio_cpu_pinning_changes", *self._labels)
        if changed:
            choices.inc()

    @cached_property
    def _buckets(self) -> tuple[dict[str, Any], Any, Any]:
        child = self._metrics.child
        fits = {fit: child("ovmstrio_bucketed_inferences", *self._labels, fit) for fit in ("exact", "padded", "larger")}
        given, added = (child("ovmstrio_padded_elements", *self._labels, part) for part in ("request", "padding"))
        return fits, given, added

    def record_padding(self, fit: str, given: int, added: int) -> None:
        """Count a bucketed inference with its input and padding elements."""
        fits, of_requests, of_padding = self._buckets
        fits[fit].inc()
        of_requests.inc(given)
        of_padding.inc(added)

    def set_load_seconds(self, seconds: float) -> None:
        """Set the load time."""
        self._metrics.child("ovmstrio_model_load_seconds", *self._labels).set(seconds)

    def set_memory(self, part: str, size: int) -> None:
        """Set the memory in bytes of one part."""
        self._metrics.set_memory(*self._labels, part, size)


def _request_labels(name: str, version: str, method: str, api: str, interface: str) -> tuple[str, ...]:
    return name, "" if method in _METHODS_WITHOUT_VERSION else version, api, method, interface


class _Everything:
    """Container of all names."""

    def __contains__(self, _: object) -> bool:
        return True


class _NoMetric:
    """No-op metric of a disabled family."""

    def inc(self, amount: Any = 1, trace_id: str = "") -> None: ...

    dec = set = set_function = observe = inc


_NO_METRIC: Final = _NoMetric()
