"""Server-sent event stream of the console: changes once a second, and an ``end`` event when the server drains.

All viewers wake at the same second and share one frame.  A slow viewer delays nothing else and gets a full frame
instead of the frames that it missed.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import structlog
import trio

from ovmstrio.console.aggregator import FAILURES, LINES, TRACES
from ovmstrio.console.series import STEP_SECONDS
from ovmstrio.core.errors import InvalidRequest, Overloaded
from ovmstrio.core.latency_histogram import empty_histogram, histogram_quantile
from ovmstrio.telemetry.logs import LEVELS
from ovmstrio.transport.http.responses import error_response, json_response
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from ovmstrio.console.aggregator import AggregatedSnapshot, ConsoleAggregator, MergedHistory
    from ovmstrio.console.snapshot import Snapshot
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.sse import EventSink

log = structlog.get_logger(__name__)

# Frames

_INTERVAL_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 10 * _INTERVAL_SECONDS
"""Age of the last frame from which on rates would be meaningless averages."""

_Key = tuple[str, str]


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    errors: int = 0
    times: list[int] = field(default_factory=empty_histogram)


@dataclass(slots=True)
class _WorkerCounts:
    """Last counts of one worker process; ``at`` is by the local clock."""

    born: str
    at: float = float("-inf")
    cpu: float = 0.0
    seen: dict[_Key, _Counts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Server state in one second: totals (``docs/console.md``), changed figures, changed rows (None if removed)."""

    number: int
    totals: dict[str, Any]
    services: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any] | None]


_SAMPLING_WORKERS: Final = 2
"""Number of workers that sample the series; each has all, so that none is lost with one of them."""


class FrameMaker:
    """Maker of the frames that all viewers share, and of the series of the last hour.

    Args:
        clock: returns seconds since the epoch.
    """

    def __init__(self, plane: DataPlane, aggregator: ConsoleAggregator, clock: Callable[[], float] = time.time) -> None:
        self._plane = plane
        self.aggregator = aggregator
        self._frame: _Frame | None = None
        self._made_at = float("-inf")
        self._processes: dict[int, _WorkerCounts] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._clock = clock
        self._interval = 0
        self._elapsed = 0.0
        self._busy = 0.0
        self._windows: dict[str, _Window] = {}
        self._total = _Window()
        self._making = trio.Lock()

    @property
    def everything(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """All service rows and all figures as of the last frame, by name."""
        return self._rows, self._figures

    async def frame(self) -> _Frame:
        """Return the current frame; make one if the last is older than half an interval."""
        async with self._making:
            now = trio.current_time()
            if self._frame is None or now - self._made_at >= _INTERVAL_SECONDS / 2:
                self._frame = await self._make(now)
                self._made_at = now
            return self._frame

    async def sample(self) -> None:
        """Make a frame at least every five seconds, so that the series have no gaps; runs until cancelled."""
        if self.aggregator.row >= _SAMPLING_WORKERS:
            return
        is_new = self.aggregator.peers is not None
        while True:
            try:
                if is_new:
                    await self.aggregator.load_series()
                    is_new = False
                await self.frame()
            except Exception:  # a missing point must not end the server
                log.exception("console sample failed")
            await trio.sleep(STEP_SECONDS - self._clock() % STEP_SECONDS)

    async def _make(self, now: float) -> _Frame:
        is_first = now - self._made_at > _STALE_SECONDS
        snapshot = await self.aggregator.look()
        # The rows are the same object as long as nothing changed.
        rows = {} if snapshot.rows is self._rows else self._changed_rows(snapshot)
        services, totals, total, windows = self._count(snapshot, now, is_first=is_first)
        readiness = self._plane.readiness()
        totals |= {
            "at": round(self._clock(), 3),
            "memory_bytes": sum(part["memory_bytes"] for part in snapshot.parts.values()),
            "ready": readiness.ready,
            "reason": readiness.reason,
        }
        self._extend_series(totals, total, windows, 0.0 if is_first else now - self._made_at)
        number = 1 if self._frame is None else self._frame.number + (2 if is_first else 1)
        return _Frame(number, totals, services, rows)

    def _extend_series(
        self, totals: dict[str, Any], total: _Window, windows: Mapping[str, _Window], seconds: float
    ) -> None:
        """Add the counts of a frame of some seconds to the current interval, or finish it if a later one has begun."""
        interval = int(self._clock() // STEP_SECONDS)
        if seconds:
            self._elapsed += seconds
            self._busy += (totals["cpu"] or 0.0) * seconds
            for name, window in windows.items():
                self._windows.setdefault(name, _Window()).extend(window, seconds)
            self._total.extend(total, seconds)
        if interval == self._interval:
            return
        if self._elapsed:
            flying = {name: each["in_flight"] for name, each in self._figures.items()}
            services = {
                name: {**window.figures(self._elapsed), "in_flight": flying.get(name, 0)}
                for name, window in self._windows.items()
            }
            server = {**totals, **self._total.figures(self._elapsed), "cpu": self._busy / self._elapsed}
            self.aggregator.series.add(self._interval, server, services)
        self._interval, self._elapsed, self._busy = interval, 0.0, 0.0
        self._windows, self._total = {}, _Window()

    def _changed_rows(self, snapshot: AggregatedSnapshot) -> dict[str, dict[str, Any] | None]:
        rows, before = snapshot.rows, self._rows
        self._rows = rows
        changed: dict[str, dict[str, Any] | None] = {name: row for name, row in rows.items() if before.get(name) != row}
        changed |= dict.fromkeys(before.keys() - rows.keys())
        return changed

    def _count(
        self, snapshot: AggregatedSnapshot, now: float, *, is_first: bool
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any], _Window, dict[str, _Window]]:
        windows: dict[str, _Window] = {}
        totals = _Window()
        in_flight: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        workers = []
        for worker, part in snapshot.parts.items():
            window, cpu = self._count_part(worker, part, now, windows)
            totals.merge(window)
            in_flight.update(part["in_flight"])
            memory.update(part["memory"])
            workers.append(_worker_document(worker, part, window, cpu))
        changed = {}
        for name in windows.keys() | in_flight.keys() | memory.keys() | self._active_services():
            figures = self._figures_of(name, windows.get(name), in_flight[name])
            if name in memory:
                figures["memory_bytes"] = memory[name]
            if figures != self._figures.get(name):
                self._figures[name] = changed[name] = figures
        figures = totals.figures()
        figures["in_flight"] = sum(in_flight.values())
        figures["cpu"] = None if is_first else round(sum(each["cpu"] or 0.0 for each in workers), 4)
        if self.aggregator.peers is not None:
            figures |= {"workers": workers, "silent": snapshot.silent}
        return changed, figures, totals, windows

    def _count_part(
        self, worker: int, part: Snapshot, now: float, windows: dict[str, _Window]
    ) -> tuple[_Window, float | None]:
        """Count the new calls of a worker; return its counts and its CPU use in cores."""
        process = self._processes.get(worker)
        if process is None or process.born != part["born"]:
            process = self._processes[worker] = _WorkerCounts(part["born"])
        seconds = now - process.at if now - process.at <= _STALE_SECONDS else None
        total = _Window()
        for name, version, requests, errors, times in part["counts"]:
            seen = process.seen.setdefault((name, version), _Counts())
            if requests != seen.requests:
                window = _Window()
                window.add(_Counts(requests, errors, times), seen, seconds)
                windows.setdefault(name, _Window()).merge(window)
                total.merge(window)
                process.seen[name, version] = _Counts(requests, errors, times)
        cpu = None if seconds is None else round((part["cpu"] - process.cpu) / seconds, 4)
        process.at, process.cpu = now, part["cpu"]
        return total, cpu

    def _active_services(self) -> set[str]:
        """Return the services whose last figures show activity or processes."""
        active = ("rate", "error_rate", "in_flight", "memory_bytes")
        return {name for name, each in self._figures.items() if any(each.get(figure) for figure in active)}

    def _figures_of(self, name: str, window: _Window | None, in_flight: int) -> dict[str, Any]:
        before = self._figures.get(name, {})
        window = window or _Window()
        figures = window.figures()
        figures["requests"] = before.get("requests", 0) + window.requests
        figures["errors"] = before.get("errors", 0) + window.errors
        figures["in_flight"] = in_flight
        return figures


class _Window:
    """Counts since the last frame, and rates of workers whose previous counts are known."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.rate = 0.0
        self._error_rate = 0.0
        self._times: list[int] | None = None

    def add(self, now: _Counts, before: _Counts, seconds: float | None) -> None:
        """Set the difference of two counts of a version; ``seconds`` is None if the time between is unknown."""
        self.requests = now.requests - before.requests
        self.errors = now.errors - before.errors
        if seconds:
            self.rate, self._error_rate = self.requests / seconds, self.errors / seconds
            self._times = [number - earlier for number, earlier in zip(now.times, before.times, strict=True)]

    def merge(self, other: _Window) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.rate += other.rate
        self._error_rate += other._error_rate
        if other._times is not None:
            self._times = other._times if self._times is None else list(map(operator.add, self._times, other._times))

    def extend(self, other: _Window, seconds: float) -> None:
        """Add the calls of a later time; the rates become counts until :meth:`figures` divides them."""
        timed = _Window()
        timed.rate, timed._error_rate, timed._times = other.rate * seconds, other._error_rate * seconds, other._times
        self.merge(timed)

    def figures(self, seconds: float = 1.0) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "rate": round(self.rate / seconds, 2),
            "error_rate": round(self._error_rate / seconds, 2),
        }
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found = None if self._times is None else histogram_quantile(self._times, part)
            figures[name] = None if found is None else round(found * 1e3, 3)
        return figures


def _worker_document(worker: int, part: Mapping[str, Any], window: _Window, cpu: float | None) -> dict[str, Any]:
    return {
        "worker": worker,
        "pid": part["pid"],
        "rate": round(window.rate, 2),
        "in_flight": sum(part["in_flight"].values()),
        "cpu": cpu,
        "memory_bytes": part["memory_bytes"],
        "ready": part["ready"],
    }


# Event stream

MAX_VIEWERS: Final = 100
"""Maximum number of streams: each stream is encoded separately."""
_KEEPALIVE_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class StreamFilter:
    """Subscription: node figures of a service, log lines from a level on (0: none), failures, traces."""

    service: str = ""
    log: int = 0
    failures: bool = False
    traces: bool = False

    @classmethod
    def read(cls, query: str) -> StreamFilter:
        """Parse the query string; raise ``InvalidRequest`` for an unknown log level."""
        parameters = parse_qs(query)
        level = parameters.get("log", [""])[-1].upper()
        if level and level not in LEVELS:
            raise InvalidRequest(f"log: expected one of {', '.join(LEVELS)}, got {shown(level, 20)}")
        failures, traces = (parameters.get(name, ["0"])[-1] != "0" for name in ("failures", "traces"))
        return cls(parameters.get("service", [""])[-1], LEVELS.get(level, 0), failures, traces)


class StreamCounter:
    """Counter of open streams."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a stream within the block; raise ``Overloaded`` at the maximum."""
        if self._count >= MAX_VIEWERS:
            raise Overloaded(f"console: limit of {MAX_VIEWERS} viewers reached")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def send_events(
    plane: DataPlane,
    frames: FrameMaker,
    stream_filter: StreamFilter,
    events: EventSink,
    *,
    may_see_bodies: Callable[[], Awaitable[bool]],
) -> None:
    """Send events until the server drains or the client leaves.

    ``may_see_bodies`` is called every second: it returns whether the viewer may see request bodies, and raises if
    access was revoked.
    """
    recent = plane.traces if stream_filter.traces else None
    wanted = {FAILURES: stream_filter.failures, LINES: stream_filter.log > 0, TRACES: stream_filter.traces}
    wanting = frames.aggregator.wanting(
        *(what for what, is_wanted in wanted.items() if is_wanted), service=stream_filter.service
    )
    with wanting, nullcontext() if recent is None else recent.watching():
        viewer = _Viewer(frames, stream_filter)
        while True:
            shows_bodies = await may_see_bodies()
            await viewer.send(events, await frames.frame(), shows_bodies=shows_bodies)
            if plane.is_draining:
                await events.send(encode_event("end", {"reason": plane.readiness().reason}))
                return
            await _next_second(plane)


class _Viewer:
    def __init__(self, frames: FrameMaker, stream_filter: StreamFilter) -> None:
        self._frames = frames
        self._aggregator = frames.aggregator
        self._filter = stream_filter
        self._traces = -1
        self._sent_traces: dict[str, int] = {}
        self._frame = self._line = self._failure = self._quiet = 0

    async def send(self, events: EventSink, frame: _Frame, *, shows_bodies: bool) -> None:
        """Send everything new, or a keepalive comment after a quiet period."""
        data = self._figures(frame) + self._past(shows_bodies=shows_bodies)
        self._quiet = 0 if data else self._quiet + 1
        if data or self._quiet >= _KEEPALIVE_SECONDS:
            self._quiet = 0
            await events.send(data or b": still here\n\n")

    def _figures(self, frame: _Frame) -> bytes:
        data = b""
        if frame.number != self._frame:
            is_next = frame.number == self._frame + 1
            data = _delta_event(frame) if is_next and self._frame else _full_event(self._frames, frame)
            self._frame = frame.number
        if self._filter.service:
            nodes = self._aggregator.nodes(self._filter.service)
            data += encode_event("nodes", {"service": self._filter.service, **nodes}) if nodes else b""
        return data

    def _past(self, *, shows_bodies: bool) -> bytes:
        past, wanted, data = self._aggregator.past, self._filter, b""
        if wanted.failures and (failures := failure_entries(past, self._failure, shows_bodies=shows_bodies)):
            self._failure = failures[-1]["number"]
            data += encode_event("failures", failures) + encode_event("failure_groups", past.failure_groups)
        if wanted.log and (lines := past.lines.since(self._line)):
            self._line = lines[-1]["number"]
            entries = _log_entries(each for each in lines if each["level"] >= wanted.log)
            data += encode_event("log", entries) if entries else b""
        if wanted.traces and past.traces and past.traces_version != self._traces:
            self._traces = past.traces_version
            # A trace is sent again when it has more spans.
            new = [each for each in past.traces if self._sent_traces.get(each["trace_id"]) != each["spans"]]
            self._sent_traces = {each["trace_id"]: each["spans"] for each in past.traces}
            data += encode_event("traces", new) if new else b""
        return data


async def _next_second(plane: DataPlane) -> None:
    now = trio.current_time()
    with trio.move_on_at((math.floor(now / _INTERVAL_SECONDS) + 1) * _INTERVAL_SECONDS):
        while not plane.is_draining:
            await plane.wait_change()


def _full_event(frames: FrameMaker, frame: _Frame) -> bytes:
    rows, figures = frames.everything
    document = {
        "number": frame.number,
        "rows": rows,
        "services": figures,
        "totals": frame.totals,
    }
    return encode_event("whole", document)


def _delta_event(frame: _Frame) -> bytes:
    document: dict[str, Any] = {"number": frame.number, "totals": frame.totals}
    if frame.services:
        document["services"] = frame.services
    if frame.rows:
        document["rows"] = frame.rows
    return encode_event("frame", document)


def _log_entries(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "level": logging.getLevelName(each["level"])} for each in lines]


def failure_entries(history: MergedHistory, number: int, *, shows_bodies: bool) -> list[dict[str, Any]]:
    """Return the kept failed calls after a number; ``shows_bodies`` keeps the request bodies."""
    hidden = {} if shows_bodies else {"body": ""}
    return [{**each, **hidden} for each in history.failures.since(number)]


def encode_event(name: str, data: Any) -> bytes:
    """Encode an event; text with lone surrogates is allowed."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_response(data).content)


def encode_error_event(error: Exception) -> bytes:
    """Encode an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_response(error).content
