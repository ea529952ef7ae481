"""What the console tells of a server, gathered of all its processes by the one that answers.

::

    somebody looks ──> own part ─────────────────┐
                   └─> the others, side by side ─┴──> parts by their numbers, and who was silent

A process that does not answer at once is named and not waited for; from then on it is asked less often.
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

from ovmstrio.api.console.merged_past import MergedPast, merged_trace
from ovmstrio.api.console.merged_services import merged_document, merged_figures, merged_rows
from ovmstrio.api.console.own_part import NO_ROWS, KnownPast, OwnPart
from ovmstrio.core.errors import NotFound
from ovmstrio.wire.http.answers import json_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ovmstrio.api.console.own_part import Part
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.recent_past import RecentPast

__all__ = ["FAILURES", "LINES", "MOST_HISTORY", "TRACES", "Gathering", "Told"]

FAILURES, LINES, TRACES = "failures", "lines", "traces"
"""What of the past may be wanted."""

MOST_HISTORY: Final = 300
"""Seconds whose totals are kept: five minutes."""
_QUESTION: Final = "console"
_DOCUMENT: Final = "console document"
_TRACE: Final = "console trace"
_ANSWER_SECONDS: Final = 0.8
"""How long other processes have to answer."""
_SILENT_SECONDS: Final = 3.0
"""How long one that did not is left alone."""
_MOST_ROUNDS: Final = 60
"""How often more is asked for at once, of what is told in batches."""


def _parse(answer: bytes) -> Any:
    """Parse the answer of another worker."""
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        # Names of files and ids of requests may hold lone surrogates, which only the standard library reads.
        return json.loads(answer)


@dataclass(frozen=True, slots=True)
class Told:
    """What was gathered at one moment.

    Attributes:
        parts: of the processes that have answered, by their numbers.
        silent: the numbers of the others.
        rows: of all services, by name; another dictionary than the last time if they may have changed since.
    """

    parts: dict[int, Part]
    silent: list[int] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


class Gathering:
    """Gathers for those who look by way of one process.

    Args:
        plane: of that process.
        past: what it remembers.

    Attributes:
        past: what was gathered of the past of all.
        history: the totals of the last minutes, which others may ask for.
    """

    def __init__(self, plane: DataPlane, past: RecentPast) -> None:
        self.siblings = plane.siblings
        self.row = 0 if self.siblings is None else self.siblings.row
        self.past = MergedPast(is_alone=self.siblings is None)
        self.history: deque[dict[str, Any]] = deque(maxlen=MOST_HISTORY)
        self._own = OwnPart(plane, past, self.history)
        self._wanted: Counter[str] = Counter()
        self._services: Counter[str] = Counter()
        self._known: dict[int, KnownPast] = {}
        self._rows_of: dict[int, dict[str, dict[str, Any]]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._told_by: list[int] = []
        self._nodes: dict[str, dict[str, Any]] = {}
        self._silent_until: dict[int, float] = {}
        self._asking = trio.Lock()
        if self.siblings is not None:
            self.siblings.answer_with(_QUESTION, self._answer)
            self.siblings.answer_with(_DOCUMENT, self._answer_document)
            self.siblings.answer_with(_TRACE, self._answer_trace)

    # What others ask

    async def _answer(self, asked: dict[str, Any]) -> bytes:
        return json_answer(self._own.tell(KnownPast(**asked), is_for_another=True)).content

    async def _answer_document(self, name: str) -> bytes:
        return json_answer(self._own.document(name)).content

    async def _answer_trace(self, trace_id: str) -> bytes:
        return json_answer(self._own.trace(trace_id)).content

    # What those want who look

    @contextmanager
    def wanting(self, *what: str, service: str = "") -> Iterator[None]:
        """Have something of the past, and the nodes of a service, be gathered within the block."""
        self._wanted.update(what)
        self._services.update([service] if service else [])
        try:
            yield
        finally:
            self._wanted.subtract(what)
            self._services.subtract([service] if service else [])
            # Names are the callers'.
            self._services = +self._services

    def nodes(self, service: str) -> dict[str, Any]:
        """Give what was told last of the nodes of a service that is wanted."""
        return self._nodes.get(service, {})

    async def look(self, *, wants_history: bool = False) -> Told:
        """Gather what is wanted now, and what has been counted since this was done last; for whoever counts, alone.

        Cancellation: at once; what was not told is told the next time.
        """
        async with self._asking:
            return await self._look(is_counting=True, wants_history=wants_history)

    async def rows(self) -> dict[str, dict[str, Any]]:
        """Give the rows of all services as they are now, be it that nothing told of a change.

        Cancellation: as :meth:`look`.
        """
        async with self._asking:
            return (await self._look(wants_rows=True)).rows

    async def look_back(self, what: str) -> None:
        """Gather all that processes have kept of the past; those are left out that take their time.

        Cancellation: as :meth:`look`.
        """
        with self.wanting(what):
            async with self._asking:
                for _ in range(_MOST_ROUNDS):
                    told = await self._look()
                    if not any(part.get(f"more_{what}") for part in told.parts.values()):
                        return

    async def _look(self, *, is_counting: bool = False, wants_rows: bool = False, wants_history: bool = False) -> Told:
        now = time.time()
        asked = {row: self._known_of(row, now, wants_history=wants_history) for row in self._asked()}
        for known in asked.values():
            known.counts, known.rows = is_counting, NO_ROWS if wants_rows else known.rows
        parts: dict[int, Part] = {self.row: self._own.tell(asked[self.row])}
        silent: list[int] = []
        if self.siblings is not None:
            questions = {row: [_QUESTION, asdict(known)] for row, known in asked.items() if row != self.row}
            found = await self._ask(questions)
            parts |= {row: _parse(each) for row, each in found.items()}
            silent = [row for row in self.siblings.others if row not in parts]
        self._take(parts, is_counting=is_counting)
        return Told(dict(sorted(parts.items())), silent, self._rows)

    def _asked(self) -> list[int]:
        now = trio.current_time()
        others = () if self.siblings is None else self.siblings.others
        return [self.row, *(row for row in others if self._silent_until.get(row, now) <= now)]

    def _known_of(self, row: int, now: float, *, wants_history: bool) -> KnownPast:
        last = self._known.get(row, KnownPast())
        known = KnownPast(
            born=last.born,
            at=last.at,
            rows=last.rows,
            until=now,
            services=list(self._services),
            history=wants_history and row != self.row,
        )
        wanted = {what: self._wanted[what] > 0 for what in (FAILURES, LINES, TRACES)}
        self.past.know(known, row, **wanted)
        return known

    async def _ask(self, questions: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Ask others, and leave those alone for a while that do not answer."""
        assert self.siblings is not None  # noqa: S101 - for who checks types
        found = await self.siblings.ask_soon(questions, _ANSWER_SECONDS)
        until = trio.current_time() + _SILENT_SECONDS
        for row in questions:
            if row in found:
                self._silent_until.pop(row, None)
            else:
                self._silent_until[row] = until
        return found

    def _take(self, parts: Mapping[int, Part], *, is_counting: bool) -> None:
        for row, part in parts.items():
            # What nobody has counted is to be told again.
            last = self._known.get(row, KnownPast())
            at = part["at"] if is_counting else last.at if last.born == part["born"] else 0.0
            self._known[row] = KnownPast(born=part["born"], at=at, rows=part["rows_number"])
        self.past.add(parts)
        new = {row: part["rows"] for row, part in parts.items() if "rows" in part}
        self._rows_of |= new
        if new or sorted(parts) != self._told_by:
            self._told_by = sorted(parts)
            self._rows = merged_rows({row: self._rows_of[row] for row in self._told_by})
        for name in self._services:
            told = {row: part["nodes"][name] for row, part in sorted(parts.items()) if name in part.get("nodes", {})}
            if told:
                self._nodes[name] = merged_figures(told)
        self._nodes = {name: self._nodes[name] for name in self._services if name in self._nodes}

    # What is asked for once

    async def document(self, name: str) -> dict[str, Any]:
        """Describe a service, as all processes have it.

        Raises:
            NotFound: nothing has that name.

        Cancellation: at once.
        """
        told = await self._of_all(_DOCUMENT, name, self._own.document(name))
        if not told:
            raise NotFound(f"nothing is served as {name[:80]!r}")
        return merged_document(told)

    async def trace(self, trace_id: str) -> dict[str, Any]:
        """Give a trace, as all processes have it together.

        Raises:
            NotFound: none has it.

        Cancellation: at once.
        """
        told = await self._of_all(_TRACE, trace_id, self._own.trace(trace_id))
        if not told:
            raise NotFound(
                f"no trace {trace_id[:40]!r} is kept; those are of the last calls that came while somebody looked"
            )
        return merged_trace(list(told.values()))

    async def _of_all(self, question: str, argument: str, own: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
        told = {self.row: own}
        if self.siblings is not None:
            others = {row: [question, argument] for row in self._asked() if row != self.row}
            told |= {row: _parse(each) for row, each in (await self._ask(others)).items()}
        return {row: each for row, each in sorted(told.items()) if each is not None}
