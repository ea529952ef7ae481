"""What the console is told once a second: computed once, however many look, and of what has changed alone.

::

    parts of all processes ─ once a second ─> Frame ─> every viewer
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.api.console.gathering import MOST_HISTORY
from ovmstrio.core.time_bands import no_times, time_quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ovmstrio.api.console.gathering import Gathering, Told
    from ovmstrio.api.console.own_part import Part
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["INTERVAL_SECONDS", "Frame", "FrameMaker"]

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
