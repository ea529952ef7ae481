"""What one process of a server tells of itself to whichever of them answers somebody who looks.

::

    a question, with what the asker knows already ──> counts that have moved, rows, lines and failures since then

Nothing is kept here of who asks, so that a process that dies, on either side, leaves nothing to be put right.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.core.latency_histogram import time_quantile
from ovmstrio.core.resource_registry import current_census
from ovmstrio.core.service import SequenceServable
from ovmstrio.serving.kind import Takes
from ovmstrio.serving.records import OK, VersionState
from ovmstrio.telemetry.process_metrics import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.service import Inside, NodeTally
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.telemetry.recent_history import RecentPast
    from ovmstrio.util.drawing import Drawing

__all__ = [
    "MOST_SEQUENCES",
    "MOST_TRACES",
    "NO_ROWS",
    "KnownPast",
    "OwnPart",
    "Part",
    "node_figures",
    "service_document",
    "service_row",
    "service_rows",
    "tally_times",
]

# ----------------------------------------------------------------------
# What the console tells of each service in its list
# ----------------------------------------------------------------------


def service_rows(plane: DataPlane) -> dict[str, dict[str, Any]]:
    """Give a row for each name, with the states of its versions and why it cannot be called, if it cannot."""
    return {name: service_row(plane, name, versions) for name, versions in plane.statuses().items()}


def service_row(plane: DataPlane, name: str, versions: Sequence[VersionStatus]) -> dict[str, Any]:
    """Give the row of one name."""
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
        "takes": sorted(each.name.lower() for each in kind.takes) if kind is not None else [],
        "state": state,
        "reason": reason,
        "versions": [_version(each) for each in versions],
    }


def _state(versions: Sequence[VersionStatus]) -> str:
    """Say in a word what a service is in: a new version that fails leaves the old one serving, which is degraded."""
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


# ----------------------------------------------------------------------
# What the console tells of one service: what it takes and gives, how it is wired, and what its parts count
# ----------------------------------------------------------------------

MOST_SEQUENCES: Final = 200
_MILLISECONDS: Final = 1e3


def service_document(plane: DataPlane, name: str) -> dict[str, Any]:
    """Describe one service.

    Raises:
        NotFound: nothing has that name, or had it.
    """
    document = service_row(plane, name, plane.registry.version_statuses(name))
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


def node_figures(plane: DataPlane, name: str) -> dict[str, Any]:
    """Tell what the nodes and streams of a service have counted, its facts, and its sequences.

    Raises:
        NotFound: nothing has that name, or it is not served now.
        VersionLoading: it is not loaded yet.
    """
    service = plane.registry.peek(name)
    return {**_figures(name, plane.registry.look_inside(name)), **_sequences(service)}


def _workers(name: str) -> dict[str, Any]:
    """Tell of the threads and processes that belong to a service."""
    census = current_census()
    pools = [pool for owner, pool in census.pools() if owner == name]
    pids = [process.pid for owner, process in census.processes() if owner == name and process.pid is not None]
    facts: dict[str, Any] = {}
    if pools:
        facts["threads of its own"] = sum(pool.threads for pool in pools)
        facts["calls that wait for a thread"] = sum(pool.waiting for pool in pools)
        facts["stuck threads"] = sum(pool.stuck for pool in pools)
    batches = [each for owner, each in census.batches() if owner == name]
    if batches:
        facts["requests that wait for their batch"] = sum(each.waiting for each in batches)
    if pids or name in census.ended:
        facts["processes"] = pids
        facts["processes that ended by themselves"] = census.ended[name]
    return facts


def _figures(name: str, inside: Inside) -> dict[str, Any]:
    return {
        "facts": {**inside.facts, **_workers(name)},
        "nodes": {key: _tally(tally) for key, tally in inside.nodes.items()},
        "streams": {str(number): tally.passed for number, tally in inside.streams.items()},
        "waiting": dict(inside.waiting),
    }


def _tally(tally: NodeTally) -> dict[str, Any]:
    return {
        "runs": tally.runs,
        "failures": tally.failures,
        "active": tally.active,
        "seconds": round(tally.seconds, 6),
        **tally_times(tally.times),
    }


def tally_times(times: Sequence[int]) -> dict[str, Any]:
    """Tell the percentiles of times that are counted in bands, and how many there are in each band."""
    median, late = (time_quantile(times, part) for part in (0.5, 0.99))
    return {
        "p50": None if median is None else round(median * _MILLISECONDS, 3),
        "p99": None if late is None else round(late * _MILLISECONDS, 3),
        "times": {str(band): count for band, count in enumerate(times) if count},
    }


def _tasks(plane: DataPlane, name: str, service: object) -> list[str]:
    """Tell what a service makes of texts, if it does."""
    if Takes.GENERATION not in plane.registry.takes_of(name):
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
        for each in live[:MOST_SEQUENCES]
    ]
    return {"sequences": rows, "sequence_count": len(live)}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.name, "shape": [str(dim) for dim in spec.shape]}


def _drawing(drawing: Drawing) -> dict[str, Any]:
    return {
        "layers": [
            [
                {"key": box.key, "kind": box.kind, "title": box.title, "subtitle": box.subtitle, "notes": box.notes}
                for box in layer
            ]
            for layer in drawing.layers
        ],
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


# ----------------------------------------------------------------------
# What one process of a server tells of itself to whichever of them answers somebody who looks
# ----------------------------------------------------------------------

MOST_TRACES: Final = 60
NO_ROWS: Final = -1
"""The number of the rows that somebody knows who wants them as they are now."""
_BATCH_BYTES: Final = 256 * 1024
"""How much text of lines, and of failures, is told at once; the rest is told when it is asked for again."""
_HELD_BACK_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 5.0
"""How long calls are recorded for somebody who looks by another process, from each of its questions."""

Part = dict[str, Any]
"""Plain data, as JSON has it."""


@dataclass(slots=True)
class KnownPast:
    """What an asker knows of a process, and wants to know besides its figures.

    Attributes:
        born: which process that was; of another one nothing is known.
        at: when it told its counts last, by its own clock.
        counts: whether they are wanted.
        rows: the number of the rows that it told.
        failure: the number of the last failure that it told; None if they are not wanted.
        line: that of the last line, likewise.
        trace: the id of the newest trace that it told, likewise.
        until: failures and lines of later times, in seconds since the epoch, are left for the next time.
        services: whose nodes are wanted.
        history: whether the totals of the last minutes are.
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
    history: bool = False


class OwnPart:
    """The process that answers.

    Args:
        plane: what it serves.
        past: what it remembers.
        history: the totals that it has told to those who looked.
    """

    def __init__(self, plane: DataPlane, past: RecentPast, history: Iterable[dict[str, Any]]) -> None:
        self._plane = plane
        self._past = past
        self._history = history
        self._born = secrets.token_hex(8)
        self._rows_number = 1
        self._rows: dict[str, dict[str, Any]] | None = None
        plane.registry.subscribe(lambda _: self._note_change())
        plane.registry.subscribe_readiness(lambda _: self._note_change())

    def _note_change(self) -> None:
        self._rows_number += 1
        self._rows = None

    def tell(self, known: KnownPast, *, is_for_another: bool = False) -> Part:
        """Tell what is new to an asker, which may be another process."""
        if known.rows == NO_ROWS:
            self._rows = None
        if known.born != self._born:
            # What is wanted is wanted from the beginning.
            known.at, known.rows = 0.0, 0
            known.failure = None if known.failure is None else 0
            known.line = None if known.line is None else 0
            known.trace = None if known.trace is None else ""
        now = time.time()
        readiness = self._plane.readiness()
        part: Part = {
            "born": self._born,
            "pid": os.getpid(),
            "at": now,
            "cpu": time.process_time(),
            "memory_bytes": resident_bytes(),
            "ready": readiness.ready,
            "reason": readiness.reason,
            "in_flight": self._plane.registry.in_flight(),
            "counts": self._counts(known.at if known.at <= now else 0.0) if known.counts else [],
            "rows_number": self._rows_number,
        }
        if known.rows != self._rows_number:
            part["rows"] = self._own_rows()
        if known.failure is not None:
            failures = (asdict(each) for each in self._past.failures.since(known.failure))
            part["failures"], part["more_failures"] = _batch(failures, known.until, "message", "body")
        if known.line is not None:
            lines = (asdict(each) for each in self._past.log.since(known.line))
            part["lines"], part["more_lines"] = _batch(lines, known.until, "event", "facts")
        if known.trace is not None:
            self._tell_traces(part, known.trace, is_for_another=is_for_another)
        if known.services:
            part["nodes"] = {name: self._nodes(name) for name in known.services}
        if known.history:
            part["history"] = list(self._history)
        return part

    def _counts(self, since: float) -> list[list[Any]]:
        """Give all that has been counted of those versions of which something has been since then."""
        return [
            [name, version, each.success.count + each.fail.count, each.fail.count, each.times[:]]
            for (name, version), each in self._plane.call_statistics.versions.items()
            if each.last_call >= since
        ]

    def _own_rows(self) -> dict[str, dict[str, Any]]:
        if self._rows is None:
            self._rows = service_rows(self._plane)
        return self._rows

    def _tell_traces(self, part: Part, newest: str, *, is_for_another: bool) -> None:
        recent = self._plane.traces
        if recent is None:
            return
        if is_for_another:
            recent.watch_for(_WATCH_SECONDS)
        found = recent.traces(MOST_TRACES)
        if found and found[0].trace_id != newest:
            part["traces"] = [each.summary() for each in found]

    def _nodes(self, name: str) -> dict[str, Any]:
        try:
            return node_figures(self._plane, name)
        except ServerError as error:
            return {"problem": error.message}

    def document(self, name: str) -> dict[str, Any] | None:
        """Describe a service; None where nothing has that name."""
        try:
            return service_document(self._plane, name)
        except NotFound:
            return None

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """Give a trace; None where it is not kept."""
        found = None if self._plane.traces is None else self._plane.traces.trace(trace_id)
        return None if found is None else found.document()


def _batch(entries: Iterable[dict[str, Any]], until: float, *texts: str) -> tuple[list[dict[str, Any]], bool]:
    """Give the first of some entries, as many as one message may have, and tell whether there are more."""
    told: list[dict[str, Any]] = []
    size = 0
    for each in entries:
        # A line of much later is one from before the clock was set back.
        if until < each["at"] < until + _HELD_BACK_SECONDS:
            break
        if size > _BATCH_BYTES:
            return told, True
        size += sum(_length(each[text]) for text in texts)
        told.append(each)
    return told, False


def _length(text: str | dict[str, str]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text.values()))
