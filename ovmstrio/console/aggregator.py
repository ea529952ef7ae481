"""Console snapshots of all workers, aggregated by the worker that serves the console.

::

    viewer ──> local snapshot ────────────────────┐
           └─> peer workers, concurrently (RPC) ──┴──> snapshots by worker index, and the silent workers

A worker that does not answer in time is reported as silent and queried less often.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson
import trio

from ovmstrio.console.series import SeriesHistory, merge_series
from ovmstrio.console.snapshot import (
    FRESH_ROWS,
    MAX_SEQUENCES,
    MAX_TRACES,
    LocalSnapshots,
    SnapshotQuery,
    latency_document,
)
from ovmstrio.core.errors import NotFound
from ovmstrio.core.latency_histogram import empty_histogram
from ovmstrio.transport.http.responses import json_response
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.console.snapshot import Snapshot
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentHistory

# History: failures, log lines and traces

_MAX_FAILURES: Final = 100
_MAX_LINES: Final = 500

_Entry = dict[str, Any]


class _MergedEntries:
    """Entries of all workers in time order, renumbered unless the server has one worker (``keeps_numbers``)."""

    def __init__(self, limit: int, *, keeps_numbers: bool) -> None:
        self._kept: deque[_Entry] = deque(maxlen=limit)
        self._keeps_numbers = keeps_numbers
        self._waiting: list[_Entry] = []
        self._seen: dict[int, tuple[str, int]] = {}
        self._count = 0

    def seen(self, worker: int, born: str) -> int:
        """Return the last number added from a worker, as that worker counts."""
        known, number = self._seen.get(worker, ("", 0))
        return number if known == born else 0

    def add(self, batches: Iterable[tuple[int, str, Sequence[_Entry], bool]]) -> None:
        """Add entries: worker index, process id token, entries, and whether the worker has more."""
        until = float("inf")
        for worker, born, entries, has_more in batches:
            if entries:
                self._seen[worker] = born, entries[-1]["number"]
                if has_more:
                    until = min(until, entries[-1]["at"])
                more = {} if self._keeps_numbers else {"worker": worker}
                self._waiting += ({**each, **more} for each in entries)
        # Entries later than an incomplete batch wait for the rest of the batch.  A single worker's own numbers are the
        # order already; timestamps may differ from that order between threads and after a clock change.
        if not self._keeps_numbers:
            self._waiting.sort(key=lambda each: each["at"])
        ready = [each for each in self._waiting if self._keeps_numbers or each["at"] <= until]
        self._waiting = self._waiting[len(ready) :]
        for each in ready:
            self._count = each["number"] if self._keeps_numbers else self._count + 1
            self._kept.append({**each, "number": self._count})

    def since(self, number: int) -> list[_Entry]:
        return [each for each in self._kept if each["number"] > number]


class MergedHistory:
    """Failures, log lines and trace summaries of all workers; ``traces_version`` counts changes of ``traces``."""

    def __init__(self, *, is_alone: bool) -> None:
        self.failures = _MergedEntries(_MAX_FAILURES, keeps_numbers=is_alone)
        self.lines = _MergedEntries(_MAX_LINES, keeps_numbers=is_alone)
        self.failure_groups: list[dict[str, Any]] = []
        self._groups_of: dict[int, list[dict[str, Any]]] = {}
        self.traces: list[dict[str, Any]] = []
        self.traces_version = 0
        self._traces_of: dict[int, list[dict[str, Any]]] = {}

    def know(self, known: SnapshotQuery, row: int, *, failures: bool, lines: bool, traces: bool) -> None:
        """Set in a query which failures, log lines and traces of a worker are known already."""
        known.failure = self.failures.seen(row, known.born) if failures else None
        known.line = self.lines.seen(row, known.born) if lines else None
        if traces:
            newest = self._traces_of.get(row)
            known.trace = newest[0]["trace_id"] if newest else ""

    def add(self, parts: Mapping[int, Snapshot]) -> bool:
        """Add snapshots by worker index; return whether a worker has more entries."""
        for merged, what in ((self.failures, "failures"), (self.lines, "lines")):
            merged.add(
                (worker, part["born"], part[what], part[f"more_{what}"])
                for worker, part in parts.items()
                if what in part
            )
        groups = {worker: part["failure_groups"] for worker, part in parts.items() if "failure_groups" in part}
        if groups:
            self._groups_of |= groups
            self.failure_groups = merge_groups([each for found in self._groups_of.values() for each in found])
        new = {worker: part["traces"] for worker, part in parts.items() if "traces" in part}
        if new:
            self._traces_of |= new
            self.traces = _merge_summaries([each for summaries in self._traces_of.values() for each in summaries])
            self.traces_version += 1
        return any(part.get("more_failures") or part.get("more_lines") for part in parts.values())


def merge_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of failed calls, the last failed first; groups of the same service, error and node are one."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in groups:
        key = each["name"], each["code"], each["node"]
        known = found.get(key)
        if known is not None:
            newer = each if each["last"] > known["last"] else known
            counts = {"count": known["count"] + each["count"], "first": min(known["first"], each["first"])}
            found[key] = {**newer, **counts}
        else:
            found[key] = each
    return sorted(found.values(), key=lambda each: -each["last"])


def _merge_summaries(summaries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return trace summaries, newest first; a trace that spans several workers is one entry."""
    found: dict[str, dict[str, Any]] = {}
    for each in summaries:
        known = found.get(each["trace_id"])
        found[each["trace_id"]] = each if known is None else _join_traces(known, each)
    return sorted(found.values(), key=lambda each: -int(each["began"]))[:MAX_TRACES]


def _join_traces(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join two workers' views of a trace; the earlier view supplies the description."""
    first, second = sorted((one, other), key=lambda each: int(each["began"]))
    began = int(first["began"])
    ended = max(int(each["began"]) + each["milliseconds"] * 1e6 for each in (one, other))
    joined = {**first, "milliseconds": round((ended - began) / 1e6, 3), "spans": one["spans"] + other["spans"]}
    joined["failure"] = first["failure"] or second["failure"]
    if "tree" in first:
        joined["tree"] = [*first["tree"], *second["tree"]]
        joined["dropped"] = first["dropped"] + second["dropped"]
    return joined


def _merge_traces(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged = documents[0]
    for each in documents[1:]:
        merged = _join_traces(merged, each)
    return merged


# Services

_Row = dict[str, Any]

_UNAVAILABLE_STATES: Final = ("failed", "loading", "unloaded")
"""States of a service that cannot be called, most important first."""
_PER_WORKER_FACTS: Final = frozenset({"threads", "streams", "infer requests"})
"""Facts that are a worker's configuration; all other numbers are counts and are added up."""


def merge_rows(rows_by_worker: Mapping[int, Mapping[str, _Row]]) -> dict[str, _Row]:
    """Merge the service rows of several workers, given by worker index."""
    if len(rows_by_worker) == 1:
        return dict(*rows_by_worker.values())
    names = dict.fromkeys(name for rows in rows_by_worker.values() for name in rows)
    return {
        name: _merge_row({worker: rows[name] for worker, rows in rows_by_worker.items() if name in rows})
        for name in names
    }


def _merge_row(rows: Mapping[int, _Row]) -> _Row:
    first = next(iter(rows.values()))
    states = {each["state"] for each in rows.values()}
    if len(states) == 1:
        state, reasons = first["state"], {worker: each["reason"] for worker, each in rows.items()}
    else:
        is_available = not states.issubset(_UNAVAILABLE_STATES)
        state = "degraded" if is_available else next(each for each in _UNAVAILABLE_STATES if each in states)
        reasons = {worker: each["reason"] or each["state"] for worker, each in rows.items() if each["state"] != "ready"}
    versions: dict[str, dict[int, _Row]] = {}
    for worker, each in rows.items():
        for version in each["versions"]:
            versions.setdefault(version["version"], {})[worker] = version
    return {
        **first,
        "state": state,
        "reason": _common_text(reasons, len(rows)),
        "versions": [_merge_version(each) for each in versions.values()],
    }


def _merge_version(versions: Mapping[int, _Row]) -> _Row:
    first = next(iter(versions.values()))
    shown = next((each for each in versions.values() if each["state"] != "AVAILABLE"), first)
    return {
        **shown,
        "reason": _common_text({worker: each["reason"] for worker, each in versions.items()}, len(versions)),
        "load_seconds": _combined((each["load_seconds"] for each in versions.values()), max),
        "memory_bytes": _combined((each["memory_bytes"] for each in versions.values()), sum),
    }


def _common_text(texts: Mapping[int, str], workers: int) -> str:
    """Return the common text of all workers, else the texts prefixed with their workers."""
    nonempty = {worker: text for worker, text in texts.items() if text}
    if len(nonempty) == workers and len(set(nonempty.values())) == 1:
        return next(iter(nonempty.values()))
    return "; ".join(f"worker {worker}: {text}" for worker, text in nonempty.items())


def _combined(numbers: Iterable[float | None], combine: Callable[[list[float]], float]) -> float | None:
    known = [each for each in numbers if each is not None]
    return combine(known) if known else None


def _merge_documents(documents: Mapping[int, _Row]) -> _Row:
    if len(documents) == 1:
        return next(iter(documents.values()))
    base = next((each for each in documents.values() if "problem" not in each), next(iter(documents.values())))
    known = {worker: each for worker, each in documents.items() if "problem" not in each}
    return {**base, **_merge_row(documents), **(merge_figures(known) if known else {})}


def merge_figures(documents: Mapping[int, _Row]) -> _Row:
    """Merge the figures of a service's nodes, streams and sequences, given by worker index."""
    known = {worker: each for worker, each in documents.items() if "problem" not in each}
    if len(documents) == 1 or not known:
        return next(iter(documents.values()))
    every = list(known.values())
    figures: _Row = {
        "facts": _merge_facts({worker: each["facts"] for worker, each in known.items()}),
        "nodes": {
            key: _merge_nodes([each["nodes"][key] for each in every if key in each["nodes"]])
            for key in dict.fromkeys(key for each in every for key in each["nodes"])
        },
        "streams": _add_counts(each["streams"] for each in every),
        "waiting": _add_counts(each["waiting"] for each in every),
    }
    if any("sequences" in each for each in every):
        live = [
            {**sequence, "worker": worker} for worker, each in known.items() for sequence in each.get("sequences", ())
        ]
        figures["sequences"] = live[:MAX_SEQUENCES]
        figures["sequence_count"] = sum(each.get("sequence_count", 0) for each in every)
    return figures


def _add_counts(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counted:
        for key, number in each.items():
            sums[key] = sums.get(key, 0) + number
    return sums


def _merge_nodes(nodes: Sequence[_Row]) -> _Row:
    times = empty_histogram()
    for each in nodes:
        for band, count in each["times"].items():
            times[int(band)] += count
    sums = {key: sum(each[key] for each in nodes) for key in ("runs", "failures", "active")}
    return {**sums, "seconds": round(sum(each["seconds"] for each in nodes), 6), **latency_document(times)}


def _merge_facts(facts_by_worker: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join lists, add up counts, keep equal values once, and list the other values by worker."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for facts in facts_by_worker.values() for key in facts):
        by_worker = {worker: facts[key] for worker, facts in facts_by_worker.items() if key in facts}
        values = list(by_worker.values())
        if all(isinstance(each, list) for each in values):
            joined[key] = [one for each in values for one in each]
        elif key not in _PER_WORKER_FACTS and all(_is_number(each) for each in values):
            joined[key] = sum(values)
        elif all(each == values[0] for each in values):
            joined[key] = values[0]
        else:
            joined[key] = {f"worker {worker}": each for worker, each in by_worker.items()}
    return joined


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Aggregation

FAILURES, LINES, TRACES = "failures", "lines", "traces"
"""Kinds of history that a viewer can subscribe to."""

_SNAPSHOT_RPC: Final = "console"
_DOCUMENT_RPC: Final = "console document"
_TRACE_RPC: Final = "console trace"
_SERIES_RPC: Final = "console series"
_ANSWER_SECONDS: Final = 0.8  # RPC timeout of peer workers
_SILENT_SECONDS: Final = 3.0  # Pause before a silent worker is queried again
_MAX_ROUNDS: Final = 60  # Maximum number of consecutive batches fetched


def _parse(answer: bytes) -> Any:
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        # File names and request ids may hold lone surrogates, which only the standard library accepts.
        return json.loads(answer)


@dataclass(frozen=True, slots=True)
class AggregatedSnapshot:
    """Local snapshots by worker index, silent workers, and service rows (the same object until a row changes)."""

    parts: dict[int, Snapshot]
    silent: list[int] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


class ConsoleAggregator:
    """Aggregator of all workers' console data for the viewers of one worker; ``series`` has the last hour."""

    def __init__(self, plane: DataPlane, history: RecentHistory) -> None:
        self.peers = plane.peers
        self.row = 0 if self.peers is None else self.peers.row
        self.past = MergedHistory(is_alone=self.peers is None)
        self.series = SeriesHistory()
        self._local = LocalSnapshots(plane, history)
        self._subscribed: Counter[str] = Counter()
        self._services: Counter[str] = Counter()
        self._known: dict[int, SnapshotQuery] = {}
        self._rows_of: dict[int, dict[str, dict[str, Any]]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._answered: list[int] = []
        self._nodes: dict[str, dict[str, Any]] = {}
        self._retry_at: dict[int, float] = {}
        self._query_lock = trio.Lock()
        if self.peers is not None:
            self.peers.register_handler(_SNAPSHOT_RPC, self._answer)
            self.peers.register_handler(_DOCUMENT_RPC, self._answer_document)
            self.peers.register_handler(_TRACE_RPC, self._answer_trace)
            self.peers.register_handler(_SERIES_RPC, self._answer_series)

    # RPC handlers

    async def _answer(self, query: dict[str, Any]) -> bytes:
        return json_response(self._local.since(SnapshotQuery(**query), is_for_another=True)).content

    async def _answer_document(self, name: str) -> bytes:
        return json_response(self._local.document(name)).content

    async def _answer_trace(self, trace_id: str) -> bytes:
        return json_response(self._local.trace(trace_id)).content

    async def _answer_series(self, service: str) -> bytes:
        return json_response(self._series_document(service)).content

    def _series_document(self, service: str) -> dict[str, Any] | None:
        document = self.series.document(service)
        return document if service or document is None else {**document, "services": self.series.services}

    # Subscriptions and snapshots

    @contextmanager
    def wanting(self, *what: str, service: str = "") -> Iterator[None]:
        """Subscribe to kinds of history and to a service's node figures within the block."""
        self._subscribed.update(what)
        self._services.update([service] if service else [])
        try:
            yield
        finally:
            self._subscribed.subtract(what)
            self._services.subtract([service] if service else [])
            # Callers choose the names: drop those with a count of zero.
            self._services = +self._services

    def nodes(self, service: str) -> dict[str, Any]:
        """Return the latest node figures of a subscribed service."""
        return self._nodes.get(service, {})

    async def look(self) -> AggregatedSnapshot:
        """Return a snapshot with the counts since the previous call; only the frame maker may call it."""
        async with self._query_lock:
            return await self._snapshot(is_counting=True)

    async def rows(self) -> dict[str, dict[str, Any]]:
        """Return fresh rows of all services, even if no change was signalled."""
        async with self._query_lock:
            return (await self._snapshot(wants_rows=True)).rows

    async def fetch_history(self, what: str) -> None:
        """Fetch all retained history of one kind; slow workers are left out."""
        with self.wanting(what):
            async with self._query_lock:
                for _ in range(_MAX_ROUNDS):
                    snapshot = await self._snapshot()
                    if not any(part.get(f"more_{what}") for part in snapshot.parts.values()):
                        return

    async def _snapshot(self, *, is_counting: bool = False, wants_rows: bool = False) -> AggregatedSnapshot:
        now = time.time()
        queries = {worker: self._query_for(worker, now) for worker in self._due_workers()}
        for query in queries.values():
            query.counts, query.rows = is_counting, FRESH_ROWS if wants_rows else query.rows
        parts: dict[int, Snapshot] = {self.row: self._local.since(queries[self.row])}
        silent: list[int] = []
        if self.peers is not None:
            calls = {worker: [_SNAPSHOT_RPC, asdict(query)] for worker, query in queries.items() if worker != self.row}
            answers = await self._ask(calls)
            parts |= {worker: _parse(each) for worker, each in answers.items()}
            silent = [worker for worker in self.peers.others if worker not in parts]
        self._apply(parts, is_counting=is_counting)
        return AggregatedSnapshot(dict(sorted(parts.items())), silent, self._rows)

    def _due_workers(self) -> list[int]:
        now = trio.current_time()
        others = () if self.peers is None else self.peers.others
        return [self.row, *(worker for worker in others if self._retry_at.get(worker, now) <= now)]

    def _query_for(self, worker: int, now: float) -> SnapshotQuery:
        last = self._known.get(worker, SnapshotQuery())
        known = SnapshotQuery(
            born=last.born,
            at=last.at,
            rows=last.rows,
            until=now,
            services=list(self._services),
        )
        wanted = {what: self._subscribed[what] > 0 for what in (FAILURES, LINES, TRACES)}
        self.past.know(known, worker, **wanted)
        return known

    async def _ask(self, calls: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Query peers; pause queries to peers that do not answer."""
        assert self.peers is not None  # noqa: S101 - for the type checker
        answers = await self.peers.call_within(calls, _ANSWER_SECONDS)
        until = trio.current_time() + _SILENT_SECONDS
        for worker in calls:
            if worker in answers:
                self._retry_at.pop(worker, None)
            else:
                self._retry_at[worker] = until
        return answers

    def _apply(self, parts: Mapping[int, Snapshot], *, is_counting: bool) -> None:
        for worker, part in parts.items():
            # A snapshot that was not counted must be sent again.
            last = self._known.get(worker, SnapshotQuery())
            at = part["at"] if is_counting else last.at if last.born == part["born"] else 0.0
            self._known[worker] = SnapshotQuery(born=part["born"], at=at, rows=part["rows_number"])
        self.past.add(parts)
        new = {worker: part["rows"] for worker, part in parts.items() if "rows" in part}
        self._rows_of |= new
        if new or sorted(parts) != self._answered:
            self._answered = sorted(parts)
            self._rows = merge_rows({worker: self._rows_of[worker] for worker in self._answered})
        for name in self._services:
            figures = {
                worker: part["nodes"][name] for worker, part in sorted(parts.items()) if name in part.get("nodes", {})
            }
            if figures:
                self._nodes[name] = merge_figures(figures)
        self._nodes = {name: self._nodes[name] for name in self._services if name in self._nodes}

    # Single requests

    async def document(self, name: str) -> dict[str, Any]:
        """Describe a service over all workers; raise ``NotFound`` if the name is unknown."""
        documents = await self._from_all(_DOCUMENT_RPC, name, self._local.document(name))
        if not documents:
            raise NotFound(f"nothing is served as {shown(name, 80)}")
        return _merge_documents(documents)

    async def trace(self, trace_id: str) -> dict[str, Any]:
        """Return a trace merged over all workers; raise ``NotFound`` if no worker has kept it."""
        views = await self._from_all(_TRACE_RPC, trace_id, self._local.trace(trace_id))
        if not views:
            raise NotFound(
                f"trace {shown(trace_id, 40)} not found: only recent calls made while a console was open are kept"
            )
        return _merge_traces(list(views.values()))

    async def series_document(self, service: str = "") -> dict[str, Any]:
        """Return the series of the server or of a service, merged over all workers that sampled them."""
        found = await self._from_all(_SERIES_RPC, service, self._series_document(service))
        return merge_series(list(found.values()))

    async def load_series(self) -> None:
        """Take over the series of the other workers, after a restart of this one."""
        services = {name for each in (await self._load_series("")).values() for name in each["services"]}
        for name in sorted(services):
            await self._load_series(name)

    async def _load_series(self, service: str) -> dict[int, dict[str, Any]]:
        found = await self._from_all(_SERIES_RPC, service, None)
        if found:
            self.series.load(service, merge_series(list(found.values())))
        return found

    async def _from_all(self, question: str, argument: str, local: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
        found = {self.row: local}
        if self.peers is not None:
            others = {worker: [question, argument] for worker in self._due_workers() if worker != self.row}
            found |= {worker: _parse(each) for worker, each in (await self._ask(others)).items()}
        return {worker: each for worker, each in sorted(found.items()) if each is not None}
