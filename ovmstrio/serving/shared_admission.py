"""Admission across worker processes: limits and queue lengths are counted over all of them.

Each worker has its own queue.  A worker that releases a place notifies the workers with queued calls, and leaves the
place to them for a moment if one of their calls has waited longer than its own.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.core.worker_peers import NO_PEER_COUNTERS
from ovmstrio.serving.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.core.worker_peers import CounterRow, Counters
    from ovmstrio.serving.admission import QueuedCall, ServiceQueue

_OFFER_SECONDS: Final = 0.01


class SharedAdmission(Admission):
    """Admission of one of several worker processes, with their shared counter table."""

    def __init__(
        self, counters: Counters, server: Limit = NO_LIMIT, limit_of: Callable[[str], Limit] = lambda _: NO_LIMIT
    ) -> None:
        super().__init__(server, limit_of)
        self._counters = counters
        self._rows: dict[str, CounterRow] = {}
        self._has_offered = trio.Event()

    async def follow_others(self) -> None:
        """Admit queued calls when other workers release places; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reclaim_offered)
            while True:
                await self._counters.wait()
                self._admit_waiting()

    async def _reclaim_offered(self) -> None:
        """Take places that were left to other workers but not used by them."""
        while True:
            await self._has_offered.wait()
            self._has_offered = trio.Event()
            await trio.sleep(_OFFER_SECONDS)
            self._admit_waiting()

    @contextmanager
    def _synchronized(self, *gates: ServiceQueue) -> Iterator[None]:
        """Hold the table's lock, read the other workers' counts on entry, and write this worker's on exit."""
        rows = [(gate, self._row_of(gate)) for gate in gates]
        if all(row is None for _, row in rows):
            yield
            return
        with self._counters.locked():
            for gate, row in rows:
                gate.elsewhere = NO_PEER_COUNTERS if row is None else row.elsewhere()
            try:
                yield
            finally:
                for gate, row in rows:
                    if row is not None:
                        queued = self._queued if gate is self._server else gate.queued
                        row.write(gate.under_way, queued, self._waiting_since(gate))

    def _row_of(self, gate: ServiceQueue) -> CounterRow | None:
        key = f"service {gate.name}" if gate.name else "server"
        known = self._rows.get(key)
        if known is None and gate.limit.max_concurrency:
            known = self._rows[key] = self._counters.row(key)
        return known

    def _waiting_since(self, gate: ServiceQueue) -> float:
        """Return the time since which the first local call waits for a place of a service, or of the server."""
        queues = [each.direct for each in self._busy.values()] if gate is self._server else [gate.direct, gate.nested]
        return min((next(iter(queue)).since for queue in queues if queue), default=math.inf)

    def _grant_or_queue(self, gate: ServiceQueue, *, is_nested: bool) -> QueuedCall | None:
        with self._synchronized(gate, self._server):
            return super()._grant_or_queue(gate, is_nested=is_nested)

    def _withdraw(self, gate: ServiceQueue, waiter: QueuedCall, *, is_nested: bool) -> None:
        with self._synchronized(gate, self._server):
            self._remove(gate, waiter, is_nested=is_nested)
        self._offer(gate)

    def leave(self, gate: ServiceQueue, *, is_nested: bool, seconds: float | None = None) -> None:
        """Release a place held for ``seconds``, and admit the next waiter of any worker."""
        with self._synchronized(gate, self._server):
            self._release(gate, is_nested=is_nested, seconds=seconds)
        self._offer(gate)

    def _offer(self, gate: ServiceQueue) -> None:
        """Offer free places to the longest waiting calls, here or in other workers."""
        theirs = (gate.elsewhere, self._server.elsewhere)
        rows = tuple({row for each in theirs for row in each.rows})
        if rows:
            self._counters.notify(rows)
        if not self._busy:
            return
        if rows and min(each.since for each in theirs) < min(self._waiting_since(each) for each in self._busy.values()):
            self._has_offered.set()
        else:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        if self._busy:
            with self._synchronized(*self._busy.values(), self._server):
                super()._admit_waiting()
