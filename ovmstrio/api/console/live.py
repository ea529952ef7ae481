"""The stream of the console: what has changed, once a second, and at once when the server ends.

Every viewer has a task of its own, which waits for the next second of a clock that all share, so that they look at one
frame.  A viewer that takes nothing holds up itself alone: what it misses it gets as a whole.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import trio

from ovmstrio.api.console.frames import INTERVAL_SECONDS
from ovmstrio.api.console.service_inside import node_figures
from ovmstrio.core.errors import InvalidRequest, Overloaded, ServerError
from ovmstrio.observability.logs import LEVELS
from ovmstrio.wire.http.answers import error_answer, json_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from ovmstrio.api.console.frames import FrameMaker
    from ovmstrio.api.event_streams import EventSink
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.recent_past import RecentPast

__all__ = [
    "MOST_TRACES",
    "MOST_VIEWERS",
    "Viewers",
    "Wishes",
    "error_event",
    "event",
    "stream",
    "told_failures",
]

MOST_TRACES: Final = 60
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
    past: RecentPast,
    wishes: Wishes,
    events: EventSink,
    *,
    still_may: Callable[[], Awaitable[bool]],
) -> None:
    """Send events until the server begins to end or nobody takes them.

    Args:
        plane: of the server.
        frames: of all viewers.
        past: what the server remembers.
        wishes: of this viewer.
        events: takes what is sent.
        still_may: is asked every second whether the viewer may see what others have sent, and raises where it may
            not look any more.

    Raises:
        ServerError: as ``still_may``.

    Cancellation: at any checkpoint.
    """
    recent = plane.traces if wishes.traces else None
    with nullcontext() if recent is None else recent.watching():
        await _send_all(plane, frames, past, wishes, events, still_may=still_may)


async def _send_all(
    plane: DataPlane,
    frames: FrameMaker,
    past: RecentPast,
    wishes: Wishes,
    events: EventSink,
    *,
    still_may: Callable[[], Awaitable[bool]],
) -> None:
    seen_trace = ""
    seen_frame = seen_line = seen_failure = quiet = 0
    while True:
        shows_bodies = await still_may()
        frame = frames.frame()
        told = b""
        if frame.number != seen_frame:
            is_next = frame.number == seen_frame + 1
            told += _delta(frame) if is_next and seen_frame else _whole(frames, frame)
            seen_frame = frame.number
        if wishes.service:
            told += event("nodes", _nodes(plane, wishes.service))
        if wishes.failures and (failures := told_failures(past, seen_failure, shows_bodies=shows_bodies)):
            seen_failure = failures[-1]["number"]
            told += event("failures", failures)
        if wishes.log and (lines := past.log.since(seen_line)):
            seen_line = lines[-1].number
            wanted = [_line(each) for each in lines if each.level >= wishes.log]
            told += event("log", wanted) if wanted else b""
        if wishes.traces and (found := _traces(plane)) and found[0]["trace_id"] != seen_trace:
            seen_trace = found[0]["trace_id"]
            told += event("traces", found)
        quiet = 0 if told else quiet + 1
        if told or quiet >= _QUIET_SECONDS:
            quiet = 0
            await events.send(told or b": still here\n\n")
        if plane.is_draining:
            await events.send(event("end", {"reason": plane.readiness().reason}))
            return
        await _next_second(plane)


async def _next_second(plane: DataPlane) -> None:
    """Wait for the next second of the clock that all viewers share, or for the server to begin to end.

    Cancellation: at once.
    """
    now = trio.current_time()
    with trio.move_on_at((math.floor(now / INTERVAL_SECONDS) + 1) * INTERVAL_SECONDS):
        while not plane.is_draining:
            await plane.wait_change()


def _whole(frames: FrameMaker, frame: Any) -> bytes:
    rows, figures = frames.everything
    whole = {
        "number": frame.number,
        "rows": rows,
        "services": figures,
        "totals": frame.totals,
        "history": frames.history,
    }
    return event("whole", whole)


def _delta(frame: Any) -> bytes:
    told: dict[str, Any] = {"number": frame.number, "totals": frame.totals}
    if frame.services:
        told["services"] = frame.services
    if frame.rows:
        told["rows"] = frame.rows
    return event("frame", told)


def _nodes(plane: DataPlane, service: str) -> dict[str, Any]:
    try:
        return {"service": service, **node_figures(plane, service)}
    except ServerError as error:
        return {"service": service, "problem": error.message}


def _traces(plane: DataPlane) -> list[dict[str, Any]]:
    return [] if plane.traces is None else [each.summary() for each in plane.traces.traces(MOST_TRACES)]


def _line(line: Any) -> dict[str, Any]:
    return {**asdict(line), "level": logging.getLevelName(line.level)}


def told_failures(past: RecentPast, number: int, *, shows_bodies: bool) -> list[dict[str, Any]]:
    """Tell of the failed calls that are kept and came behind a number."""
    hidden = {} if shows_bodies else {"body": ""}
    return [{**asdict(each), **hidden} for each in past.failures.since(number)]


def event(name: str, data: Any) -> bytes:
    """Write one event, whatever texts of others are in it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_answer(data).content)


def error_event(error: Exception) -> bytes:
    """Write an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_answer(error).content
