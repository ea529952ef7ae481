"""Failures, lines of the log and traces of all processes of a server, in the order of their times."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.console.own_part import MOST_TRACES, KnownPast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ovmstrio.api.console.own_part import Part

__all__ = ["MergedPast", "merged_trace", "merged_traces"]

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
