"""Console snapshot of one worker: counts, service rows, failures, log lines and traces.

::

    query (what the querying worker knows already) ──> everything newer

No state per querying worker is kept, so either side may die without cleanup.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.core.latency_histogram import histogram_quantile
from ovmstrio.core.resource_registry import current_resource_registry
from ovmstrio.core.service import SequenceServable
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.records import OK, VersionState
from ovmstrio.telemetry.process_metrics import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.service import Introspection, NodeCounters
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.telemetry.recent_history import RecentHistory
    from ovmstrio.util.drawing import Drawing

# Service rows


def _service_rows(plane: DataPlane) -> dict[str, dict[str, Any]]:
    return {name: _service_row(plane, name, versions) for name, versions in plane.statuses().items()}


def _service_row(plane: DataPlane, name: str, versions: Sequence[VersionStatus]) -> dict[str, Any]:
    registry = plane.registry
    kind = registry.kinds.get(registry.kind_of(name))
    state = _state(versions)
    if state == "unloaded" and registry.is_configured(name):
        state = "failed"
    reason = "" if state == "ready" else next((each.reason for each in reversed(versions) if each.reason), "")
    if not reason and state not in {"ready", "unloaded"}:
        reason = registry.why_not(name)
    return {
        "name": name,
        "kind": registry.kind_of(name),
        "takes": sorted(each.name.lower() for each in kind.call_types) if kind is not None else [],
        "state": state,
        "reason": reason,
        "versions": [_version(each) for each in versions],
    }


def _state(versions: Sequence[VersionStatus]) -> str:
    """Return the state; a failed new version next to a serving old one is ``degraded``."""
    available = [each for each in versions if each.state is VersionState.AVAILABLE]
    failed = any(each.error_code != OK and each.state is not VersionState.END for each in versions)
    if available:
        return "degraded" if failed else "ready"
    if any(each.state <= VersionState.LOADING and each.error_code == OK for each in versions):
        return "loading"
    return "failed" if any(each.error_code != OK for each in versions) else "unloaded"


def _version(status: VersionStatus) -> dict[str, Any]:
    return {
        "version": str(status.version),
        "state": status.state.name,
        "reason": status.reason,
        "load_seconds": status.load_seconds,
        "memory_bytes": status.grown_bytes,
    }


# Service details

MAX_SEQUENCES: Final = 200
_MILLISECONDS: Final = 1e3


def _service_document(plane: DataPlane, name: str) -> dict[str, Any]:
    document = _service_row(plane, name, plane.registry.version_statuses(name))
    try:
        service = plane.registry.peek(name)
        inside = plane.registry.look_inside(name)
    except ServerError as error:
        return {**document, "problem": error.message}
    metadata = service.metadata
    return {
        **document,
        "platform": metadata.platform,
        "inputs": [_tensor(each) for each in metadata.inputs],
        "outputs": [_tensor(each) for each in metadata.outputs],
        "tasks": _tasks(plane, name, service),
        "drawing": None if inside.drawing is None else _drawing(inside.drawing),
        "labels": list(metadata.labels[:1000]),
        **_figures(name, inside),
        **_sequences(service),
    }


def _node_figures(plane: DataPlane, name: str) -> dict[str, Any]:
    service = plane.registry.peek(name)
    return {**_figures(name, plane.registry.look_inside(name)), **_sequences(service)}


def _workers(name: str) -> dict[str, Any]:
    resources = current_resource_registry()
    pools = [pool for owner, pool in resources.pools() if owner == name]
    pids = [process.pid for owner, process in resources.processes() if owner == name and process.pid is not None]
    facts: dict[str, Any] = {}
    if pools:
        facts["dedicated threads"] = sum(pool.threads for pool in pools)
        facts["calls waiting for a thread"] = sum(pool.waiting for pool in pools)
        facts["stuck threads"] = sum(pool.stuck for pool in pools)
    batches = [each for owner, each in resources.batches() if owner == name]
    if batches:
        facts["requests waiting for a batch"] = sum(each.waiting for each in batches)
    if pids or name in resources.ended:
        facts["processes"] = pids
        facts["processes exited"] = resources.ended[name]
    return facts


def _process_memory() -> dict[str, int]:
    """Return the resident memory of the processes of each service that has some, in whole MiB."""
    sums: Counter[str] = Counter()
    for owner, process in current_resource_registry().processes():
        if process.pid is not None:
            sums[owner] += resident_bytes(process.pid)
    return {name: size >> 20 << 20 for name, size in sums.items()}


def _figures(name: str, inside: Introspection) -> dict[str, Any]:
    return {
        "facts": {**inside.facts, **_workers(name)},
        "nodes": {key: _tally(tally) for key, tally in inside.nodes.items()},
        "streams": {str(number): tally.passed for number, tally in inside.streams.items()},
        "waiting": dict(inside.waiting),
    }


def _tally(tally: NodeCounters) -> dict[str, Any]:
    return {
        "runs": tally.runs,
        "failures": tally.failures,
        "active": tally.active,
        "seconds": round(tally.seconds, 6),
        **latency_document(tally.times),
    }


def latency_document(times: Sequence[int]) -> dict[str, Any]:
    """Return percentiles in milliseconds and the non-empty buckets of a latency histogram."""
    median, late = (histogram_quantile(times, part) for part in (0.5, 0.99))
    return {
        "p50": None if median is None else round(median * _MILLISECONDS, 3),
        "p99": None if late is None else round(late * _MILLISECONDS, 3),
        "times": {str(band): count for band, count in enumerate(times) if count},
    }


def _tasks(plane: DataPlane, name: str, service: object) -> list[str]:
    if CallType.GENERATION not in plane.registry.call_types(name):
        return []
    return sorted(task.value for task in cast("GenerativeService", service).tasks)


def _sequences(service: object) -> dict[str, Any]:
    if not isinstance(service, SequenceServable):
        return {}
    live = service.sequences()
    rows = [
        {
            "id": str(each.id),
            "age_seconds": round(each.age_seconds, 1),
            "idle_seconds": round(each.idle_seconds, 1),
            "requests": each.requests,
        }
        for each in live[:MAX_SEQUENCES]
    ]
    return {"sequences": rows, "sequence_count": len(live)}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.name, "shape": [str(dim) for dim in spec.shape]}


def _drawing(drawing: Drawing) -> dict[str, Any]:
    return {
        "layers": [[asdict(box) for box in layer] for layer in drawing.layers],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "stream": edge.stream,
                "label": edge.label,
                "is_back": edge.is_back,
                "is_side": edge.is_side,
            }
            for edge in drawing.edges
        ],
    }


# Snapshot

MAX_TRACES: Final = 200
FRESH_ROWS: Final = -1
"""Value of :attr:`KnownPast.rows` that requests fresh rows."""
_BATCH_BYTES: Final = 256 * 1024  # Approximate text size of one batch of log lines or failures
_CLOCK_JUMP_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 5.0  # Recording period that a query from a peer worker starts or extends

Snapshot = dict[str, Any]
"""JSON-compatible document."""


@dataclass(slots=True)
class SnapshotQuery:
    """Query: what the querying worker knows already, and what it wants.

    Attributes:
        born: token of the process that answered last; the answer restarts if it differs.
        at: time of the last counts, by the clock of the answering process.
        counts: send the call counts.
        rows: change number of the known rows.
        failure: number of the last known failure; None if failures are not wanted.
        line: number of the last known log line; None if log lines are not wanted.
        trace: id of the newest known trace; None if traces are not wanted.
        until: upper time limit of failures and log lines, in seconds since the epoch.
        services: services whose node figures are wanted.
    """

    born: str = ""
    at: float = 0.0
    counts: bool = True
    rows: int = 0
    failure: int | None = None
    line: int | None = None
    trace: str | None = None
    until: float = 0.0
    services: Sequence[str] = field(default_factory=tuple)


class LocalSnapshots:
    """Snapshot source of this worker."""

    def __init__(self, plane: DataPlane, past: RecentHistory) -> None:
        self._plane = plane
        self._past = past
        self._born = secrets.token_hex(8)
        self._rows_number = 1
        self._rows: dict[str, dict[str, Any]] | None = None
        plane.registry.subscribe(lambda _: self._note_change())
        plane.registry.subscribe_readiness(lambda _: self._note_change())

    def _note_change(self) -> None:
        self._rows_number += 1
        self._rows = None

    def since(self, known: SnapshotQuery, *, is_for_another: bool = False) -> Snapshot:
        """Return everything that is newer than the query; ``is_for_another`` marks a query of a peer worker."""
        if known.rows == FRESH_ROWS:
            self._rows = None
        if known.born != self._born:
            # The process was restarted: send everything from the beginning.
            known.at, known.rows = 0.0, 0
            known.failure = None if known.failure is None else 0
            known.line = None if known.line is None else 0
            known.trace = None if known.trace is None else ""
        now = time.time()
        readiness = self._plane.readiness()
        part: Snapshot = {
            "born": self._born,
            "pid": os.getpid(),
            "at": now,
            "cpu": time.process_time(),
            "memory_bytes": resident_bytes(),
            "ready": readiness.ready,
            "reason": readiness.reason,
            "in_flight": self._plane.registry.in_flight(),
            "memory": _process_memory(),
            "counts": self._counts(known.at if known.at <= now else 0.0) if known.counts else [],
            "rows_number": self._rows_number,
        }
        if known.rows != self._rows_number:
            part["rows"] = self._current_rows()
        if known.failure is not None:
            failures = (asdict(each) for each in self._past.failures.since(known.failure))
            part["failures"], part["more_failures"] = _batch(failures, known.until, "message", "body")
            if part["failures"]:
                part["failure_groups"] = [asdict(each) for each in self._past.failures.groups]
        if known.line is not None:
            lines = (asdict(each) for each in self._past.log.since(known.line))
            part["lines"], part["more_lines"] = _batch(lines, known.until, "event", "facts")
        if known.trace is not None:
            self._add_traces(part, known.trace, is_for_another=is_for_another)
        if known.services:
            part["nodes"] = {name: self._nodes(name) for name in known.services}
        return part

    def _counts(self, since: float) -> list[list[Any]]:
        return [
            [name, version, each.success.count + each.fail.count, each.fail.count, each.times[:]]
            for (name, version), each in self._plane.call_statistics.versions.items()
            if each.last_call >= since
        ]

    def _current_rows(self) -> dict[str, dict[str, Any]]:
        if self._rows is None:
            self._rows = _service_rows(self._plane)
        return self._rows

    def _add_traces(self, part: Snapshot, newest: str, *, is_for_another: bool) -> None:
        recent = self._plane.traces
        if recent is None:
            return
        if is_for_another:
            recent.watch_seconds(_WATCH_SECONDS)
        found = recent.traces(MAX_TRACES)
        if found and found[0].trace_id != newest:
            part["traces"] = [each.summary() for each in found]

    def _nodes(self, name: str) -> dict[str, Any]:
        try:
            return _node_figures(self._plane, name)
        except ServerError as error:
            return {"problem": error.message}

    def document(self, name: str) -> dict[str, Any] | None:
        """Describe a service; return None if the name is unknown."""
        try:
            return _service_document(self._plane, name)
        except NotFound:
            return None

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """Return a trace; None if it is not kept."""
        found = None if self._plane.traces is None else self._plane.traces.trace(trace_id)
        return None if found is None else found.document()


def _batch(entries: Iterable[dict[str, Any]], until: float, *texts: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the first entries, up to one message's size, and whether there are more."""
    batch: list[dict[str, Any]] = []
    size = 0
    for each in entries:
        # A much later entry dates from before the clock was set back.
        if until < each["at"] < until + _CLOCK_JUMP_SECONDS:
            break
        if size > _BATCH_BYTES:
            return batch, True
        values = (each[text] for text in texts)
        size += sum(len(value) if isinstance(value, str) else sum(map(len, value.values())) for value in values)
        batch.append(each)
    return batch, False
