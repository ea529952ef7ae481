"""What the console is told once a second: computed once, however many look, and of what has changed alone.

::

    calls ─> CallStatistics ─┐
    registry ────────────────┼─ once a second ─> Frame ─> every viewer
    process, loop ───────────┘
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.api.console.service_rows import service_rows
from ovmstrio.core.time_bands import no_times, time_quantile
from ovmstrio.observability.resident_memory import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.call_statistics import VersionStatistics

__all__ = ["INTERVAL_SECONDS", "Frame", "FrameMaker"]

INTERVAL_SECONDS: Final = 1.0
_KEPT: Final = 300
"""Frames whose totals a new viewer gets: five minutes."""
_STALE_SECONDS: Final = 10 * INTERVAL_SECONDS
"""Nobody has looked for so long that rates would be means over that time."""

_Key = tuple[str, str]


@dataclass(slots=True)
class _Seen:
    """What had been counted of a version at the last frame."""

    requests: int = 0
    errors: int = 0
    times: list[int] = field(default_factory=no_times)


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
        plane: whose server it is.
        cpu: tells the seconds that the process has worked.
    """

    def __init__(self, plane: DataPlane, cpu: Callable[[], float] = time.process_time) -> None:
        self._plane = plane
        self._cpu = cpu
        self._frame: Frame | None = None
        self._made_at = float("-inf")
        self._cpu_before = 0.0
        self._seen: dict[_Key, _Seen] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._rows_are_old = True
        self._history: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        plane.registry.subscribe(lambda _: self._note_change())
        plane.registry.subscribe_readiness(lambda _: self._note_change())

    def _note_change(self) -> None:
        self._rows_are_old = True

    @property
    def history(self) -> list[dict[str, Any]]:
        """The totals of the last five minutes, as far as somebody looked."""
        return list(self._history)

    @property
    def everything(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """All rows and all figures as of the last frame, by name."""
        return self._rows, self._figures

    def frame(self) -> Frame:
        """Give the frame of this moment: the last one, if it is younger than half an interval."""
        now = trio.current_time()
        if self._frame is None or now - self._made_at >= INTERVAL_SECONDS / 2:
            self._frame = self._make(now)
        return self._frame

    def _make(self, now: float) -> Frame:
        seconds = now - self._made_at
        is_first = seconds > _STALE_SECONDS
        self._made_at = now
        rows = self._changed_rows() if self._rows_are_old else {}
        services, totals = self._count(1.0 if is_first else seconds, is_first=is_first)
        cpu, before = self._cpu(), self._cpu_before
        self._cpu_before = cpu
        readiness = self._plane.readiness()
        totals |= {
            "at": round(time.time(), 3),
            "cpu": None if is_first else round((cpu - before) / seconds, 4),
            "memory_bytes": resident_bytes(),
            "ready": readiness.ready,
            "reason": readiness.reason,
        }
        if is_first:
            self._history.clear()
        self._history.append(totals)
        number = 1 if self._frame is None else self._frame.number + (2 if is_first else 1)
        return Frame(number, totals, services, rows)

    def _changed_rows(self) -> dict[str, dict[str, Any] | None]:
        self._rows_are_old = False
        rows, before = service_rows(self._plane), self._rows
        self._rows = rows
        changed: dict[str, dict[str, Any] | None] = {name: row for name, row in rows.items() if before.get(name) != row}
        changed |= dict.fromkeys(before.keys() - rows.keys())
        return changed

    def _count(self, seconds: float, *, is_first: bool) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        windows: dict[str, _Window] = {}
        totals = _Window()
        for key, statistics in self._plane.call_statistics.versions.items():
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen()
            if statistics.success.count + statistics.fail.count == seen.requests:
                continue
            window = windows.get(key[0])
            if window is None:
                window = windows[key[0]] = _Window()
            window.add(statistics, seen, counts_times=not is_first)
        for window in windows.values():
            totals.merge(window)
        in_flight = self._plane.registry.in_flight()
        changed = {}
        for name in windows.keys() | in_flight.keys() | self._moving():
            figures = self._figures_of(name, windows.get(name), in_flight.get(name, 0), seconds, is_first=is_first)
            if figures != self._figures.get(name):
                self._figures[name] = changed[name] = figures
        told = totals.figures(seconds, is_first=is_first)
        told["in_flight"] = sum(in_flight.values())
        return changed, told

    def _moving(self) -> set[str]:
        """Give those whose figures say that something moved when they were told last."""
        return {name for name, each in self._figures.items() if each["rate"] or each["error_rate"] or each["in_flight"]}

    def _figures_of(
        self, name: str, window: _Window | None, in_flight: int, seconds: float, *, is_first: bool
    ) -> dict[str, Any]:
        before = self._figures.get(name, {})
        window = window or _Window()
        figures = window.figures(seconds, is_first=is_first)
        figures["requests"] = before.get("requests", 0) + window.requests
        figures["errors"] = before.get("errors", 0) + window.errors
        figures["in_flight"] = in_flight
        return figures


class _Window:
    """What was counted since the last frame."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self._times: list[int] | None = None

    def add(self, statistics: VersionStatistics, seen: _Seen, *, counts_times: bool) -> None:
        """Add what is new of a version, and note it as seen."""
        requests, errors = statistics.success.count + statistics.fail.count, statistics.fail.count
        self.requests += requests - seen.requests
        self.errors += errors - seen.errors
        if counts_times:
            new = [now - before for now, before in zip(statistics.times, seen.times, strict=True)]
            self._join(new)
        seen.requests, seen.errors, seen.times = requests, errors, statistics.times[:]

    def merge(self, other: _Window) -> None:
        """Add what another one has."""
        self.requests += other.requests
        self.errors += other.errors
        if other._times is not None:
            self._join(other._times)

    def _join(self, times: list[int]) -> None:
        self._times = times if self._times is None else list(map(sum, zip(self._times, times, strict=True)))

    def figures(self, seconds: float, *, is_first: bool) -> dict[str, Any]:
        """Give rates a second and times in milliseconds; nothing of a window that has no beginning."""
        told: dict[str, Any] = {"rate": 0.0, "error_rate": 0.0, "p50": None, "p90": None, "p99": None}
        if is_first:
            return told
        told["rate"] = round(self.requests / seconds, 2)
        told["error_rate"] = round(self.errors / seconds, 2)
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found = None if self._times is None else time_quantile(self._times, part)
            told[name] = None if found is None else round(found * 1e3, 3)
        return told
