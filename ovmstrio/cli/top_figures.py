"""Figures of `ovms top`, computed from two snapshots of a server's metrics.

::

    /metrics, list of versions ──> Look ─┐
    the same, a little later   ──> Look ─┴─ figures_between ──> ServerFigures
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ovmstrio.core.events import QUERY_METHODS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.client import ModelState

FAMILIES: Final = (
    "ovms_request_time_us",
    "ovms_requests_fail",
    "ovms_current_requests",
    "ovms_graph_processing_time_us",
    "ovms_graph_error",
    "ovms_requests_rejected",
    "ovms_current_graphs",
    "ovmstrio_batch_queued_requests",
    "ovmstrio_queued_requests",
    "ovmstrio_memory_bytes",
    "ovmstrio_thread_queue_length",
    "ovmstrio_worker_memory_bytes",
    "ovmstrio_sequences",
    "ovmstrio_llm_requests_waiting",
    "ovmstrio_llm_generation_tokens",
    "ovmstrio_llm_kv_cache_usage",
    "ovmstrio_connections",
    "ovmstrio_ready",
    "process_resident_memory_bytes",
    "process_cpu_seconds",
)
"""Metric families that are requested."""

Key = tuple[str, str]
"""Name and version; metrics of graphs have no version."""

_TIMES: Final = frozenset({"ovms_request_time_us", "ovms_graph_processing_time_us"})
_FAILURES: Final = frozenset({"ovms_requests_fail", "ovms_graph_error", "ovms_requests_rejected"})
_WAITING: Final = frozenset(
    {
        "ovmstrio_batch_queued_requests",
        "ovmstrio_llm_requests_waiting",
        "ovmstrio_queued_requests",
        "ovmstrio_thread_queue_length",
    }
)
_AT_WORK: Final = frozenset({"ovms_current_requests", "ovms_current_graphs"})


@dataclass(slots=True)
class Look:
    """Snapshot of a server's metrics; ``at`` is its time on a clock in seconds.

    ``times`` are cumulative histograms: the number of calls by upper bound in microseconds.
    """

    at: float
    states: list[ModelState] = field(default_factory=list)
    times: dict[Key, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    failures: Counter[Key] = field(default_factory=Counter)
    at_work: Counter[Key] = field(default_factory=Counter)
    memory: dict[Key, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    queued: Counter[str] = field(default_factory=Counter)
    process_bytes: Counter[str] = field(default_factory=Counter)
    sequences: dict[Key, int] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    cache_usage: dict[str, float] = field(default_factory=dict)
    resident_bytes: float | None = None
    cpu_seconds: float | None = None
    connections: Counter[str] = field(default_factory=Counter)
    ready: bool | None = None


@dataclass(frozen=True, slots=True)
class ServableFigures:
    """Figures of one version of a servable; unknown figures are None.

    ``queued`` is the number of calls that wait for admission, a thread or a batch. ``memory_bytes`` is the memory of
    the load plus that of worker processes. ``cache_usage`` is from 0 to 1.
    """

    name: str
    version: str
    state: str
    requests_per_second: float
    errors_per_second: float
    in_flight: int
    queued: int
    p50_ms: float | None
    p99_ms: float | None
    memory_bytes: int | None
    sequences: int | None = None
    tokens_per_second: float | None = None
    cache_usage: float | None = None


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of a server and its servables; ``cpu`` is the average number of busy CPUs."""

    ready: bool | None
    resident_bytes: int | None
    cpu: float | None
    connections: dict[str, int]
    servables: list[ServableFigures]


def read_look(text: str, states: Iterable[ModelState], at: float) -> Look:
    """Parse metrics in Prometheus's text format.

    Raises:
        ValueError: the text has another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    look = Look(at, list(states))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _read_sample(look, sample.name, sample.labels, sample.value)
    return look


def _read_sample(look: Look, name: str, labels: Mapping[str, str], value: float) -> None:
    key = labels.get("name", ""), labels.get("version", "")
    bare = name.removesuffix("_total")
    if name.removesuffix("_bucket") in _TIMES:
        look.times[key][float(labels["le"])] += int(value)
    elif bare in _FAILURES and labels.get("method") not in QUERY_METHODS:
        look.failures[key] += int(value)
    elif bare in _AT_WORK:
        look.at_work[key] += int(value)
    elif bare in _WAITING:
        look.queued[key[0] or labels.get("model_name", "")] += int(value)
    elif bare == "ovmstrio_worker_memory_bytes":
        look.process_bytes[key[0]] += int(value)
    elif bare == "ovmstrio_sequences":
        look.sequences[key] = int(value)
    elif bare == "ovmstrio_llm_generation_tokens":
        look.tokens[labels["model_name"]] = value
    elif bare == "ovmstrio_llm_kv_cache_usage":
        look.cache_usage[labels["model_name"]] = value
    elif bare == "ovmstrio_memory_bytes":
        look.memory[key][labels["part"]] = value
    else:
        _read_server(look, bare, labels, value)


def _read_server(look: Look, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == "process_resident_memory_bytes":
        look.resident_bytes = value
    elif name == "process_cpu_seconds":
        look.cpu_seconds = value
    elif name == "ovmstrio_connections":
        look.connections[labels["interface"]] += int(value)
    elif name == "ovmstrio_ready":
        look.ready = bool(value)


def figures_between(before: Look, now: Look) -> ServerFigures:
    """Compute the figures between two snapshots; after a restart of the server counters start at zero."""
    seconds = max(now.at - before.at, 1e-9)
    cpu = None
    if now.cpu_seconds is not None:
        earlier = before.cpu_seconds or 0.0
        cpu = (now.cpu_seconds - (earlier if earlier <= now.cpu_seconds else 0.0)) / seconds
    resident = None if now.resident_bytes is None else int(now.resident_bytes)
    servables = [_servable(state, before, now, seconds) for state in now.states]
    servables.sort(key=lambda each: (-each.requests_per_second, -each.in_flight, each.name, each.version))
    return ServerFigures(now.ready, resident, cpu, dict(now.connections), servables)


def _servable(state: ModelState, before: Look, now: Look, seconds: float) -> ServableFigures:
    keys: list[Key] = [(state.name, state.version)]
    if not any(other.name == state.name and other is not state for other in now.states):
        keys.append((state.name, ""))
    times = _since(_sum(now.times, keys), _sum(before.times, keys))
    failures = sum(now.failures[key] for key in keys)
    earlier = sum(before.failures[key] for key in keys)
    memory = now.memory.get(keys[0], {})
    is_known = bool(memory) or state.name in now.process_bytes
    loaded = memory.get("resident", sum(memory.values()))
    return ServableFigures(
        name=state.name,
        version=state.version,
        state=state.state,
        requests_per_second=max(times.values(), default=0) / seconds,
        errors_per_second=(failures - earlier if failures >= earlier else failures) / seconds,
        in_flight=sum(now.at_work[key] for key in keys),
        queued=now.queued[state.name],
        p50_ms=quantile(times, 0.5),
        p99_ms=quantile(times, 0.99),
        memory_bytes=int(loaded) + now.process_bytes[state.name] if is_known else None,
        sequences=now.sequences.get(keys[0]),
        tokens_per_second=_rate(now.tokens.get(state.name), before.tokens.get(state.name, 0.0), seconds),
        cache_usage=now.cache_usage.get(state.name),
    )


def _rate(now: float | None, before: float, seconds: float) -> float | None:
    """Return the rate per second; a counter that has decreased was reset to zero."""
    if now is None:
        return None
    return (now - before if now >= before else now) / seconds


def _sum(times: Mapping[Key, Counter[float]], keys: Iterable[Key]) -> Counter[float]:
    summed: Counter[float] = Counter()
    for key in keys:
        summed.update(times.get(key, Counter()))
    return summed


def _since(now: Counter[float], before: Counter[float]) -> dict[float, int]:
    """Return the differences; if a counter has decreased, all counters were reset to zero."""
    if any(now[bound] < number for bound, number in before.items()):
        return dict(now)
    return {bound: number - before[bound] for bound, number in now.items()}


def quantile(times: Mapping[float, int], part: float) -> float | None:
    """Return a quantile of the calls' times in milliseconds; None if there are no calls.

    Calls are assumed to be distributed evenly within a bucket. Above the last finite bound the result is that bound.
    """
    bounds = sorted(times)
    if not bounds or not times[bounds[-1]]:
        return None
    rank = part * times[bounds[-1]]
    lower, below = 0.0, 0
    for bound in bounds:
        if times[bound] >= rank:
            break
        lower, below = bound, times[bound]
    inside = times[bound] - below
    if bound == float("inf") or not inside:
        return lower / 1e3
    return (lower + (bound - lower) * (rank - below) / inside) / 1e3
