"""The stream of the console: what has changed, once a second, and at once when the server ends.

Every viewer has a task of its own, which waits for the next second of a clock that all share, so that they look at one
frame.  A viewer that takes nothing holds up itself alone: what it misses it gets as a whole.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import trio

from ovmstrio.api.console.frames import INTERVAL_SECONDS
from ovmstrio.api.console.gathering import FAILURES, LINES, TRACES
from ovmstrio.core.errors import InvalidRequest, Overloaded
from ovmstrio.observability.logs import LEVELS
from ovmstrio.wire.http.answers import error_answer, json_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from ovmstrio.api.console.frames import Frame, FrameMaker
    from ovmstrio.api.console.gathering import Gathering
    from ovmstrio.api.console.merged_past import MergedPast
    from ovmstrio.api.event_streams import EventSink
    from ovmstrio.dataplane.plane import DataPlane

__all__ = [
    "MOST_VIEWERS",
    "Viewers",
    "Wishes",
    "error_event",
    "event",
    "stream",
    "told_failures",
    "told_lines",
]

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
