"""Record of the outcomes of all clients, and of the outcomes that are expected at a time."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

ALL_CLIENTS: Final[frozenset[str]] = frozenset()
"""Clients of a window that concerns all clients."""
LONGEST_LIST: Final = 60


class CallOutcome(Enum):
    RIGHT = "right answers"
    WRONG = "wrong answers"
    REFUSED = "refused: unavailable or too many requests"
    MISSING = "refused: no such service"
    FORGOTTEN = "refused: no such sequence"
    FAILED = "server errors"
    LOST = "connection lost"
    SILENT = "timed out"
    UNREACHED = "connection refused"


@dataclass(slots=True)
class Window:
    """Time in which some clients may receive other outcomes than right answers.

    Attributes:
        why: the disturbance of the servers.
        allows: the outcomes that are allowed.
        clients: the names of the clients; all where it is empty.
        ends: :data:`math.inf` while it is open.
    """

    why: str
    allows: frozenset[CallOutcome]
    clients: frozenset[str]
    begins: float
    ends: float = math.inf

    def excuses(self, call: Call) -> bool:
        is_meant = not self.clients or call.client in self.clients
        return is_meant and call.outcome in self.allows and call.begun <= self.ends and call.ended >= self.begins


@dataclass(frozen=True, slots=True)
class Call:
    client: str
    outcome: CallOutcome
    begun: float
    ended: float
    context: str


@dataclass(slots=True)
class Ledger:
    counts: Counter[tuple[str, CallOutcome]] = field(default_factory=Counter)
    windows: list[Window] = field(default_factory=list)
    odd: list[Call] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client: str, outcome: CallOutcome, begun: float, context: str = "") -> None:
        with self._lock:
            self.counts[client, outcome] += 1
            if outcome is not CallOutcome.RIGHT:
                self.odd.append(Call(client, outcome, begun, time.monotonic(), context))

    def find(self, what: str) -> None:
        self.findings.append(f"{time.monotonic() - self.began:.1f} s: {what}")

    @contextmanager
    def window(
        self, why: str, *allows: CallOutcome, clients: frozenset[str] = ALL_CLIENTS, after_seconds: float = 0.0
    ) -> Iterator[None]:
        window = Window(why, frozenset(allows), clients, time.monotonic())
        self.windows.append(window)
        try:
            yield
        finally:
            window.ends = time.monotonic() + after_seconds

    def violations(self) -> list[str]:
        calls = [call for call in self.odd if not any(window.excuses(call) for window in self.windows)]
        alike: dict[tuple[str, ...], list[Call]] = {}
        for call in calls:
            what = (call.client, call.outcome.value, call.context[:300], self._concurrent_disturbances(call))
            alike.setdefault(what, []).append(call)
        return [*self.findings, *(self._describe(what, each) for what, each in alike.items())]

    def _concurrent_disturbances(self, call: Call) -> str:
        disturbances = [
            window.why for window in self.windows if window.begins <= call.ended and call.begun <= window.ends
        ]
        return ", ".join(dict.fromkeys(disturbances)) or "nothing"

    def _describe(self, what: tuple[str, ...], calls: list[Call]) -> str:
        begun, ended = calls[0].begun - self.began, calls[0].ended - self.began
        client, outcome, context, disturbances = what
        times = f"{len(calls)} times, first " if len(calls) > 1 else ""
        return f"{times}{begun:.2f} to {ended:.2f} s: {client}: {outcome}: {context} (meanwhile: {disturbances})"

    def __str__(self) -> str:
        clients = sorted({client for client, _ in self.counts})
        lines = []
        for client in clients:
            parts = [f"{count} {outcome.value}" for outcome in CallOutcome if (count := self.counts[client, outcome])]
            lines.append(f"  {client}: " + ", ".join(parts))
        done = Counter(window.why for window in self.windows)
        lines.append("disturbances: " + ", ".join(f"{why} x{count}" for why, count in done.most_common()))
        violations = self.violations()
        total = sum(self.counts.values())
        lines.append(f"{total} calls, {len(violations)} violations")
        return "\n".join([*lines, *violations[:LONGEST_LIST]])
