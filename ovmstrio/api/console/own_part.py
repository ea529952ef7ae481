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
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.console.service_inside import node_figures, service_document
from ovmstrio.api.console.service_rows import service_rows
from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.observability.resident_memory import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.recent_past import RecentPast

__all__ = ["MOST_TRACES", "NO_ROWS", "KnownPast", "OwnPart", "Part"]

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
