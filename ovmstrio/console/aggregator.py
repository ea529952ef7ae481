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

from ovmstrio.console.snapshot import MOST_SEQUENCES, MOST_TRACES, NO_ROWS, KnownPast, OwnPart, tally_times
from ovmstrio.core.errors import NotFound
from ovmstrio.core.latency_histogram import no_times
from ovmstrio.transport.http.responses import json_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.console.snapshot import Part
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentPast

__all__ = [
    "FAILURES",
    "LINES",
    "MOST_HISTORY",
    "TRACES",
    "Gathering",
    "MergedPast",
    "Told",
    "merged_document",
    "merged_figures",
    "merged_rows",
    "merged_trace",
    "merged_traces",
]

# ----------------------------------------------------------------------
# Failures, lines of the log and traces of all processes of a server, in the order of their times
# ----------------------------------------------------------------------

_MOST_FAILURES: Final = 100
_MOST_LINES: Final = 500

_Entry = dict[str, Any]


class _Merged:
    """Entries of all processes that have been told, each with a number of its own among all.

    Args:
        most: how many are kept.
        keeps_numbers: whether one process is all that there is, whose numbers are good.
    """

    def __init__(self, most: int, *, keeps_numbers: bool) -> None:
        self._kept: deque[_Entry] = deque(maxlen=most)
        self._keeps_numbers = keeps_numbers
        self._waiting: list[_Entry] = []
        self._seen: dict[int, tuple[str, int]] = {}
        self._count = 0

    def seen(self, row: int, born: str) -> int:
        """Give the number of the last entry of a process that was added, by its own count."""
        known, number = self._seen.get(row, ("", 0))
        return number if known == born else 0

    def add(self, told: Iterable[tuple[int, str, Sequence[_Entry], bool]]) -> None:
        """Add what processes have told: number and birth of each, its entries, and whether it has more of them."""
        until = float("inf")
        for row, born, entries, has_more in told:
            if entries:
                self._seen[row] = born, entries[-1]["number"]
                if has_more:
                    until = min(until, entries[-1]["at"])
                more = {} if self._keeps_numbers else {"worker": row}
                self._waiting += ({**each, **more} for each in entries)
        # What others have told of a later time stands behind what is still to come.  Numbers that are kept are an order
        # already, of which times of several threads, or of a clock that was set, may be another.
        if not self._keeps_numbers:
            self._waiting.sort(key=lambda each: each["at"])
        ready = [each for each in self._waiting if self._keeps_numbers or each["at"] <= until]
        self._waiting = self._waiting[len(ready) :]
        for each in ready:
            self._count = each["number"] if self._keeps_numbers else self._count + 1
            self._kept.append({**each, "number": self._count})

    def since(self, number: int) -> list[_Entry]:
        """Give those that are kept and came behind a number, oldest first."""
        return [each for each in self._kept if each["number"] > number]


class MergedPast:
    """What the processes of a server remember, as far as it has been told.

    Args:
        is_alone: whether the server is one process.

    Attributes:
        failures: the last ones.
        lines: the last ones of the log.
        traces: the newest ones in short.
        traces_number: goes up whenever they change.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.failures = _Merged(_MOST_FAILURES, keeps_numbers=is_alone)
        self.lines = _Merged(_MOST_LINES, keeps_numbers=is_alone)
        self.traces: list[dict[str, Any]] = []
        self.traces_number = 0
        self._traces_of: dict[int, list[dict[str, Any]]] = {}

    def know(self, known: KnownPast, row: int, *, failures: bool, lines: bool, traces: bool) -> None:
        """Note for a question what has been told, of what is wanted."""
        known.failure = self.failures.seen(row, known.born) if failures else None
        known.line = self.lines.seen(row, known.born) if lines else None
        if traces:
            newest = self._traces_of.get(row)
            known.trace = newest[0]["trace_id"] if newest else ""

    def add(self, parts: Mapping[int, Part]) -> bool:
        """Add what processes have told by their numbers; tells whether one of them has more."""
        for merged, what in ((self.failures, "failures"), (self.lines, "lines")):
            merged.add(
                (row, part["born"], part[what], part[f"more_{what}"]) for row, part in parts.items() if what in part
            )
        new = {row: part["traces"] for row, part in parts.items() if "traces" in part}
        if new:
            self._traces_of |= new
            self.traces = merged_traces([each for told in self._traces_of.values() for each in told])
            self.traces_number += 1
        return any(part.get("more_failures") or part.get("more_lines") for part in parts.values())


def merged_traces(summaries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give traces in short, the newest first; one that went through several processes is one."""
    found: dict[str, dict[str, Any]] = {}
    for each in summaries:
        known = found.get(each["trace_id"])
        found[each["trace_id"]] = each if known is None else _joined(known, each)
    return sorted(found.values(), key=lambda each: -int(each["began"]))[:MOST_TRACES]


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join what two processes tell of a trace; the one in which it began tells what it is."""
    first, second = sorted((one, other), key=lambda each: int(each["began"]))
    began = int(first["began"])
    ended = max(int(each["began"]) + each["milliseconds"] * 1e6 for each in (one, other))
    joined = {**first, "milliseconds": round((ended - began) / 1e6, 3), "spans": one["spans"] + other["spans"]}
    joined["failure"] = first["failure"] or second["failure"]
    if "tree" in first:
        joined["tree"] = [*first["tree"], *second["tree"]]
        joined["dropped"] = first["dropped"] + second["dropped"]
    return joined


def merged_trace(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one trace of what some processes have of it."""
    whole = documents[0]
    for each in documents[1:]:
        whole = _joined(whole, each)
    return whole


# ----------------------------------------------------------------------
# What the processes of a server tell of its services, as one answer
# ----------------------------------------------------------------------

_Row = dict[str, Any]

_CANNOT: Final = ("failed", "loading", "unloaded")
"""States of what cannot be called, what is told of first when they differ."""
_OF_EACH: Final = frozenset({"threads", "streams", "infer requests"})
"""Numbers of one process that say how it is set up; all others are counts of what there is or was."""


def merged_rows(told: Mapping[int, Mapping[str, _Row]]) -> dict[str, _Row]:
    """Make one row for each name of those of some processes, by their numbers."""
    if len(told) == 1:
        return dict(*told.values())
    names = dict.fromkeys(name for rows in told.values() for name in rows)
    return {name: _row({row: rows[name] for row, rows in told.items() if name in rows}) for name in names}


def _row(of: Mapping[int, _Row]) -> _Row:
    first = next(iter(of.values()))
    states = {each["state"] for each in of.values()}
    if len(states) == 1:
        state, reasons = first["state"], {row: each["reason"] for row, each in of.items()}
    else:
        can = not states.issubset(_CANNOT)
        state = "degraded" if can else next(each for each in _CANNOT if each in states)
        reasons = {row: each["reason"] or each["state"] for row, each in of.items() if each["state"] != "ready"}
    versions: dict[str, dict[int, _Row]] = {}
    for row, each in of.items():
        for version in each["versions"]:
            versions.setdefault(version["version"], {})[row] = version
    return {
        **first,
        "state": state,
        "reason": _one_text(reasons, len(of)),
        "versions": [_version(each) for each in versions.values()],
    }


def _version(of: Mapping[int, _Row]) -> _Row:
    first = next(iter(of.values()))
    odd = next((each for each in of.values() if each["state"] != "AVAILABLE"), first)
    return {
        **odd,
        "reason": _one_text({row: each["reason"] for row, each in of.items()}, len(of)),
        "load_seconds": _over((each["load_seconds"] for each in of.values()), max),
        "memory_bytes": _over((each["memory_bytes"] for each in of.values()), sum),
    }


def _one_text(texts: Mapping[int, str], processes: int) -> str:
    """Tell once what all of them say, and else who says what."""
    said = {row: text for row, text in texts.items() if text}
    if len(said) == processes and len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"worker {row}: {text}" for row, text in said.items())


def _over(numbers: Iterable[float | None], join: Callable[[list[float]], float]) -> float | None:
    known = [each for each in numbers if each is not None]
    return join(known) if known else None


def merged_document(told: Mapping[int, _Row]) -> _Row:
    """Make one description of a service of those of some processes, by their numbers."""
    if len(told) == 1:
        return next(iter(told.values()))
    whole = next((each for each in told.values() if "problem" not in each), next(iter(told.values())))
    known = {row: each for row, each in told.items() if "problem" not in each}
    return {**whole, **_row(told), **(merged_figures(known) if known else {})}


def merged_figures(told: Mapping[int, _Row]) -> _Row:
    """Make one of what some processes tell of the nodes, the streams and the sequences of a service."""
    known = {row: each for row, each in told.items() if "problem" not in each}
    if len(told) == 1 or not known:
        return next(iter(told.values()))
    every = list(known.values())
    figures: _Row = {
        "facts": _facts({row: each["facts"] for row, each in known.items()}),
        "nodes": {
            key: _node([each["nodes"][key] for each in every if key in each["nodes"]]) for key in _keys(every, "nodes")
        },
        "streams": _sums(each["streams"] for each in every),
        "waiting": _sums(each["waiting"] for each in every),
    }
    if any("sequences" in each for each in every):
        live = [{**one, "worker": row} for row, each in known.items() for one in each.get("sequences", ())]
        figures["sequences"] = live[:MOST_SEQUENCES]
        figures["sequence_count"] = sum(each.get("sequence_count", 0) for each in every)
    return figures


def _keys(every: Iterable[_Row], of: str) -> list[str]:
    return list(dict.fromkeys(key for each in every for key in each[of]))


def _sums(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counted:
        for key, number in each.items():
            sums[key] = sums.get(key, 0) + number
    return sums


def _node(tallies: Sequence[_Row]) -> _Row:
    times = no_times()
    for each in tallies:
        for band, count in each["times"].items():
            times[int(band)] += count
    sums = {key: sum(each[key] for each in tallies) for key in ("runs", "failures", "active")}
    return {**sums, "seconds": round(sum(each["seconds"] for each in tallies), 6), **tally_times(times)}


def _facts(told: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join facts: lists and counts of all, what is the same everywhere once, and the rest by process."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for facts in told.values() for key in facts):
        of = {row: facts[key] for row, facts in told.items() if key in facts}
        values = list(of.values())
        if all(isinstance(each, list) for each in values):
            joined[key] = [one for each in values for one in each]
        elif key not in _OF_EACH and all(_is_number(each) for each in values):
            joined[key] = sum(values)
        elif all(each == values[0] for each in values):
            joined[key] = values[0]
        else:
            joined[key] = {f"worker {row}": each for row, each in of.items()}
    return joined


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ----------------------------------------------------------------------
# What the console tells of a server, gathered of all its processes by the one that answers
# ----------------------------------------------------------------------

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
