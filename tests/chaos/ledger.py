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

EVERYBODY: Final[frozenset[str]] = frozenset()
"""Of a window: it is about every client."""
LONGEST_LIST: Final = 60


class Said(Enum):
    RIGHT = "right answers"
    WRONG = "wrong answers"
    REFUSED = "refused: not now, or not so many"
    MISSING = "refused: no such service"
    FORGOTTEN = "refused: no such sequence"
    FAILED = "the server's failures"
    LOST = "without an answer"
    SILENT = "not ended in time"
    UNREACHED = "not accepted"


@dataclass(slots=True)
class Window:
    """A time in which some clients may be told other things than right answers.

    Attributes:
        why: what was done to the servers.
        allows: what they may be told.
        whom: the names of the clients; all where it is empty.
        ends: :data:`math.inf` while it is open.
    """

    why: str
    allows: frozenset[Said]
    whom: frozenset[str]
    begins: float
    ends: float = math.inf

    def excuses(self, call: Call) -> bool:
        is_meant = not self.whom or call.client in self.whom
        return is_meant and call.said in self.allows and call.begun <= self.ends and call.ended >= self.begins


@dataclass(frozen=True, slots=True)
class Call:
    client: str
    said: Said
    begun: float
    ended: float
    context: str


@dataclass(slots=True)
class Ledger:
    counts: Counter[tuple[str, Said]] = field(default_factory=Counter)
    windows: list[Window] = field(default_factory=list)
    odd: list[Call] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client: str, said: Said, begun: float, context: str = "") -> None:
        with self._lock:
            self.counts[client, said] += 1
            if said is not Said.RIGHT:
                self.odd.append(Call(client, said, begun, time.monotonic(), context))

    def find(self, what: str) -> None:
        self.findings.append(f"{time.monotonic() - self.began:.1f} s: {what}")

    @contextmanager
    def window(
        self, why: str, *allows: Said, whom: frozenset[str] = EVERYBODY, after_seconds: float = 0.0
    ) -> Iterator[None]:
        window = Window(why, frozenset(allows), whom, time.monotonic())
        self.windows.append(window)
        try:
            yield
        finally:
            window.ends = time.monotonic() + after_seconds

    def violations(self) -> list[str]:
        calls = [call for call in self.odd if not any(window.excuses(call) for window in self.windows)]
        alike: dict[tuple[str, ...], list[Call]] = {}
        for call in calls:
            what = (call.client, call.said.value, call.context[:300], self._beside(call))
            alike.setdefault(what, []).append(call)
        return [*self.findings, *(self._told(what, each) for what, each in alike.items())]

    def _beside(self, call: Call) -> str:
        beside = [window.why for window in self.windows if window.begins <= call.ended and call.begun <= window.ends]
        return ", ".join(dict.fromkeys(beside)) or "nothing"

    def _told(self, what: tuple[str, ...], calls: list[Call]) -> str:
        begun, ended = calls[0].begun - self.began, calls[0].ended - self.began
        client, said, context, beside = what
        times = f"{len(calls)} times, first " if len(calls) > 1 else ""
        return f"{times}{begun:.2f} to {ended:.2f} s: {client}: {said}: {context} (meanwhile: {beside})"

    def __str__(self) -> str:
        clients = sorted({client for client, _ in self.counts})
        lines = []
        for client in clients:
            parts = [f"{count} {said.value}" for said in Said if (count := self.counts[client, said])]
            lines.append(f"  {client}: " + ", ".join(parts))
        done = Counter(window.why for window in self.windows)
        lines.append("done to the servers: " + ", ".join(f"{why} x{count}" for why, count in done.most_common()))
        violations = self.violations()
        total = sum(self.counts.values())
        lines.append(f"{total} calls, {len(violations)} violations")
        return "\n".join([*lines, *violations[:LONGEST_LIST]])
