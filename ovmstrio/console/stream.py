"""The stream of the console: what has changed, once a second, and at once when the server ends.

Every viewer has a task of its own, which waits for the next second of a clock that all share, so that they look at one
frame.  A viewer that takes nothing holds up itself alone: what it misses it gets as a whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import trio

from ovmstrio.console.aggregator import FAILURES, LINES, MOST_HISTORY, TRACES
from ovmstrio.core.errors import InvalidRequest, Overloaded
from ovmstrio.core.latency_histogram import no_times, time_quantile
from ovmstrio.telemetry.logs import LEVELS
from ovmstrio.transport.http.responses import error_answer, json_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.console.aggregator import Gathering, MergedPast, Told
    from ovmstrio.console.snapshot import Part
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.event_streams import EventSink

__all__ = [
    "INTERVAL_SECONDS",
    "MOST_VIEWERS",
    "Frame",
    "FrameMaker",
    "Viewers",
    "Wishes",
    "error_event",
    "event",
    "stream",
    "told_failures",
    "told_lines",
]

# ----------------------------------------------------------------------
# What the console is told once a second: computed once, however many look, and of what has changed alone
# ----------------------------------------------------------------------

INTERVAL_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 10 * INTERVAL_SECONDS
"""Nobody has looked for so long that rates would be means over that time."""

_Key = tuple[str, str]


@dataclass(slots=True)
class _Seen:
    """What had been counted of a version at the last frame."""

    requests: int = 0
    errors: int = 0
    times: list[int] = field(default_factory=no_times)


@dataclass(slots=True)
class _Process:
    """What one process had told at its last part; ``at`` is of this process's clock."""

    born: str
    at: float = float("-inf")
    cpu: float = 0.0
    seen: dict[_Key, _Seen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frame:
    """One second of a server.

    Attributes:
        number: of all frames; one that is not the next of the last means that some were missed.
        totals: of the server: see ``docs/console.md``.
        services: the figures of services in which something has changed, by name.
        rows: of the list of services, those that have changed; None for a service that is not told of any more.
    """

    number: int
    totals: dict[str, Any]
    services: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any] | None]


class FrameMaker:
    """Makes the frames of one server, as long as somebody asks for them.

    Args:
        plane: of this process, which says whether the server is ready.
        gathering: tells what all processes have counted.
    """

    def __init__(self, plane: DataPlane, gathering: Gathering) -> None:
        self._plane = plane
        self._gathering = gathering
        self._frame: Frame | None = None
        self._made_at = float("-inf")
        self._processes: dict[int, _Process] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._history = gathering.history
        self._making = trio.Lock()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The totals of the last five minutes, as far as somebody looked."""
        return list(self._history)

    @property
    def everything(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """All rows and all figures as of the last frame, by name."""
        return self._rows, self._figures

    async def frame(self) -> Frame:
        """Give the frame of this moment: the last one, if it is younger than half an interval.

        Cancellation: at once; another one who waits makes it then.
        """
        async with self._making:
            now = trio.current_time()
            if self._frame is None or now - self._made_at >= INTERVAL_SECONDS / 2:
                self._frame = await self._make(now)
                self._made_at = now
            return self._frame

    async def _make(self, now: float) -> Frame:
        is_first = now - self._made_at > _STALE_SECONDS
        told = await self._gathering.look(wants_history=is_first)
        # Somebody else may have looked since, whom changes were told.
        rows = {} if told.rows is self._rows else self._changed_rows(told)
        services, totals = self._count(told, now, is_first=is_first)
        readiness = self._plane.readiness()
        totals |= {
            "at": round(time.time(), 3),
            "memory_bytes": sum(part["memory_bytes"] for part in told.parts.values()),
            "ready": readiness.ready,
            "reason": readiness.reason,
        }
        if is_first:
            self._take_history(told.parts.values(), totals["at"])
        self._history.append({key: each for key, each in totals.items() if key not in _OF_THE_MOMENT})
        number = 1 if self._frame is None else self._frame.number + (2 if is_first else 1)
        return Frame(number, totals, services, rows)

    def _take_history(self, parts: Iterable[Part], now: float) -> None:
        """Begin with what others were told who looked by way of other processes."""
        known = sorted((each for part in parts for each in part.get("history", ())), key=lambda each: each["at"])
        seconds = {int(each["at"]): each for each in known if now - MOST_HISTORY * INTERVAL_SECONDS < each["at"] < now}
        self._history.clear()
        self._history.extend(seconds.values())

    def _changed_rows(self, told: Told) -> dict[str, dict[str, Any] | None]:
        rows, before = told.rows, self._rows
        self._rows = rows
        changed: dict[str, dict[str, Any] | None] = {name: row for name, row in rows.items() if before.get(name) != row}
        changed |= dict.fromkeys(before.keys() - rows.keys())
        return changed

    def _count(self, told: Told, now: float, *, is_first: bool) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        windows: dict[str, _Window] = {}
        totals = _Window()
        in_flight: Counter[str] = Counter()
        workers = []
        for row, part in told.parts.items():
            window, cpu = self._count_part(row, part, now, windows)
            totals.merge(window)
            in_flight.update(part["in_flight"])
            workers.append(_worker(row, part, window, cpu))
        changed = {}
        for name in windows.keys() | in_flight.keys() | self._moving():
            figures = self._figures_of(name, windows.get(name), in_flight[name])
            if figures != self._figures.get(name):
                self._figures[name] = changed[name] = figures
        figures = totals.figures()
        figures["in_flight"] = sum(in_flight.values())
        figures["cpu"] = None if is_first else round(sum(each["cpu"] or 0.0 for each in workers), 4)
        if self._gathering.siblings is not None:
            figures |= {"workers": workers, "silent": told.silent}
        return changed, figures

    def _count_part(
        self, row: int, part: Part, now: float, windows: dict[str, _Window]
    ) -> tuple[_Window, float | None]:
        """Count what is new in a process; gives all of it, and how many processors it had."""
        process = self._processes.get(row)
        if process is None or process.born != part["born"]:
            process = self._processes[row] = _Process(part["born"])
        seconds = now - process.at if now - process.at <= _STALE_SECONDS else None
        whole = _Window()
        for name, version, requests, errors, times in part["counts"]:
            seen = process.seen.setdefault((name, version), _Seen())
            if requests != seen.requests:
                window = _Window()
                window.add(_Seen(requests, errors, times), seen, seconds)
                windows.setdefault(name, _Window()).merge(window)
                whole.merge(window)
                process.seen[name, version] = _Seen(requests, errors, times)
        cpu = None if seconds is None else round((part["cpu"] - process.cpu) / seconds, 4)
        process.at, process.cpu = now, part["cpu"]
        return whole, cpu

    def _moving(self) -> set[str]:
        """Give those whose figures say that something moved when they were told last."""
        return {name for name, each in self._figures.items() if each["rate"] or each["error_rate"] or each["in_flight"]}

    def _figures_of(self, name: str, window: _Window | None, in_flight: int) -> dict[str, Any]:
        before = self._figures.get(name, {})
        window = window or _Window()
        figures = window.figures()
        figures["requests"] = before.get("requests", 0) + window.requests
        figures["errors"] = before.get("errors", 0) + window.errors
        figures["in_flight"] = in_flight
        return figures


class _Window:
    """What was counted since the last frame, and rates of those processes whose counts then are known."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.rate = 0.0
        self._error_rate = 0.0
        self._times: list[int] | None = None

    def add(self, now: _Seen, before: _Seen, seconds: float | None) -> None:
        """Add what is new of a version in so many seconds; None if nobody knows how long that took."""
        self.requests = now.requests - before.requests
        self.errors = now.errors - before.errors
        if seconds:
            self.rate, self._error_rate = self.requests / seconds, self.errors / seconds
            self._times = [number - earlier for number, earlier in zip(now.times, before.times, strict=True)]

    def merge(self, other: _Window) -> None:
        """Add what another one has."""
        self.requests += other.requests
        self.errors += other.errors
        self.rate += other.rate
        self._error_rate += other._error_rate
        if other._times is not None:
            self._times = other._times if self._times is None else _sums(self._times, other._times)

    def figures(self) -> dict[str, Any]:
        """Give rates a second and times in milliseconds."""
        told: dict[str, Any] = {"rate": round(self.rate, 2), "error_rate": round(self._error_rate, 2)}
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found = None if self._times is None else time_quantile(self._times, part)
            told[name] = None if found is None else round(found * 1e3, 3)
        return told


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return list(map(sum, zip(one, other, strict=True)))


def _worker(row: int, part: Mapping[str, Any], window: _Window, cpu: float | None) -> dict[str, Any]:
    return {
        "worker": row,
        "pid": part["pid"],
        "rate": round(window.rate, 2),
        "in_flight": sum(part["in_flight"].values()),
        "cpu": cpu,
        "memory_bytes": part["memory_bytes"],
        "ready": part["ready"],
    }


_OF_THE_MOMENT: Final = frozenset({"workers", "silent"})
"""What the charts have no use for."""


# ----------------------------------------------------------------------
# The stream of the console: what has changed, once a second, and at once when the server ends
# ----------------------------------------------------------------------

MOST_VIEWERS: Final = 100
"""Streams at once; each of them has what it is told written for it alone."""
_QUIET_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a viewer wants besides the figures of all services.

    Attributes:
        service: whose nodes are to be told of; empty for none.
        log: lines of this level and above, of ``logging``'s numbers; 0 for none.
        failures: whether failed calls are to be told.
        traces: whether calls are to be recorded for it, and told in short.
    """

    service: str = ""
    log: int = 0
    failures: bool = False
    traces: bool = False

    @classmethod
    def read(cls, query: str) -> Wishes:
        """Read what a query asks for.

        Raises:
            InvalidRequest: there is no such level.
        """
        asked = parse_qs(query)
        level = asked.get("log", [""])[-1].upper()
        if level and level not in LEVELS:
            raise InvalidRequest(f"log: expected one of {', '.join(LEVELS)}, got {level[:20]!r}")
        failures, traces = (asked.get(name, ["0"])[-1] != "0" for name in ("failures", "traces"))
        return cls(asked.get("service", [""])[-1], LEVELS.get(level, 0), failures, traces)


class Viewers:
    """Counts the streams of a server."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more within the block.

        Raises:
            Overloaded: there are as many as there may be.
        """
        if self._count >= MOST_VIEWERS:
            raise Overloaded(f"the console has {self._count} viewers, and there are no more at once")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def stream(
    plane: DataPlane,
    frames: FrameMaker,
    gathering: Gathering,
    wishes: Wishes,
    events: EventSink,
    *,
    still_may: Callable[[], Awaitable[bool]],
) -> None:
    """Send events until the server begins to end or nobody takes them.

    Args:
        plane: of the server.
        frames: of all viewers.
        gathering: of what all processes of the server tell.
        wishes: of this viewer.
        events: takes what is sent.
        still_may: is asked every second whether the viewer may see what others have sent, and raises where it may
            not look any more.

    Raises:
        ServerError: as ``still_may``.

    Cancellation: at any checkpoint.
    """
    recent = plane.traces if wishes.traces else None
    wanted = {FAILURES: wishes.failures, LINES: wishes.log > 0, TRACES: wishes.traces}
    wanting = gathering.wanting(*(what for what, is_wanted in wanted.items() if is_wanted), service=wishes.service)
    with wanting, nullcontext() if recent is None else recent.watching():
        viewer = _Viewer(frames, gathering, wishes)
        while True:
            shows_bodies = await still_may()
            await viewer.tell(events, await frames.frame(), shows_bodies=shows_bodies)
            if plane.is_draining:
                await events.send(event("end", {"reason": plane.readiness().reason}))
                return
            await _next_second(plane)


class _Viewer:
    """What one viewer has been told."""

    def __init__(self, frames: FrameMaker, gathering: Gathering, wishes: Wishes) -> None:
        self._frames = frames
        self._gathering = gathering
        self._wishes = wishes
        self._traces = -1
        self._frame = self._line = self._failure = self._quiet = 0

    async def tell(self, events: EventSink, frame: Frame, *, shows_bodies: bool) -> None:
        """Send what is new, and something now and then while nothing is."""
        told = self._figures(frame) + self._past(shows_bodies=shows_bodies)
        self._quiet = 0 if told else self._quiet + 1
        if told or self._quiet >= _QUIET_SECONDS:
            self._quiet = 0
            await events.send(told or b": still here\n\n")

    def _figures(self, frame: Frame) -> bytes:
        told = b""
        if frame.number != self._frame:
            is_next = frame.number == self._frame + 1
            told = _delta(frame) if is_next and self._frame else _whole(self._frames, frame)
            self._frame = frame.number
        if self._wishes.service:
            nodes = self._gathering.nodes(self._wishes.service)
            told += event("nodes", {"service": self._wishes.service, **nodes}) if nodes else b""
        return told

    def _past(self, *, shows_bodies: bool) -> bytes:
        past, wishes, told = self._gathering.past, self._wishes, b""
        if wishes.failures and (failures := told_failures(past, self._failure, shows_bodies=shows_bodies)):
            self._failure = failures[-1]["number"]
            told += event("failures", failures)
        if wishes.log and (lines := past.lines.since(self._line)):
            self._line = lines[-1]["number"]
            wanted = told_lines(each for each in lines if each["level"] >= wishes.log)
            told += event("log", wanted) if wanted else b""
        if wishes.traces and past.traces and past.traces_number != self._traces:
            self._traces = past.traces_number
            told += event("traces", past.traces)
        return told


async def _next_second(plane: DataPlane) -> None:
    """Wait for the next second of the clock that all viewers share, or for the server to begin to end.

    Cancellation: at once.
    """
    now = trio.current_time()
    with trio.move_on_at((math.floor(now / INTERVAL_SECONDS) + 1) * INTERVAL_SECONDS):
        while not plane.is_draining:
            await plane.wait_change()


def _whole(frames: FrameMaker, frame: Frame) -> bytes:
    rows, figures = frames.everything
    whole = {
        "number": frame.number,
        "rows": rows,
        "services": figures,
        "totals": frame.totals,
        "history": frames.history,
    }
    return event("whole", whole)


def _delta(frame: Frame) -> bytes:
    told: dict[str, Any] = {"number": frame.number, "totals": frame.totals}
    if frame.services:
        told["services"] = frame.services
    if frame.rows:
        told["rows"] = frame.rows
    return event("frame", told)


def told_lines(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell of lines of the log, their levels by name."""
    return [{**each, "level": logging.getLevelName(each["level"])} for each in lines]


def told_failures(past: MergedPast, number: int, *, shows_bodies: bool) -> list[dict[str, Any]]:
    """Tell of the failed calls that are kept and came behind a number."""
    hidden = {} if shows_bodies else {"body": ""}
    return [{**each, **hidden} for each in past.failures.since(number)]


def event(name: str, data: Any) -> bytes:
    """Write one event, whatever texts of others are in it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_answer(data).content)


def error_event(error: Exception) -> bytes:
    """Write an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_answer(error).content
