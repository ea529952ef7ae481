"""Admission: grants, queues or refuses calls by the concurrency limits of the server and of each service.

::

    call ──> enter ──┬─ one place of the service and one of the server ──> in flight ──> release
                     ├─ wait in the service's queue, holding nothing          ^             │
                     └─ refused: queue full                                   └── first waiter with free places

A nested call (made by a pipeline or graph for a call in flight) needs a place of its callee only, not of the server,
and precedes calls that wait for the server.  A holder of a place therefore only waits for places further down the
acyclic call graph, so no deadlock can occur.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import contextmanager
from itertools import count
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from ovmstrio.core.errors import Overloaded, QueueTimeExceeded
from ovmstrio.core.limits import NO_LIMIT, Limit, current_ticket, release_current_ticket
from ovmstrio.core.worker_peers import NO_PEER_COUNTERS, SERVER_COUNTER
from ovmstrio.serving.load_shedding import LoadShedding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ovmstrio.core.events import Interface
    from ovmstrio.core.limits import AdmissionTicket, ConcurrencyLimit
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.core.service import LeasedServable, Servable, ServableLookup
    from ovmstrio.core.worker_peers import CounterRow, Counters
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.load_shedding import CallCounts
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.serving.registry import Registry

# ----------------------------------------------------------------------
# Admission in one process
# ----------------------------------------------------------------------

_AVERAGE_WEIGHT: Final = 0.1
"""Weight of the latest call in the moving average of call times."""


class Admission:
    """Concurrency limits of one server and of its services.

    Args:
        server: limit of all calls together.
        limit_of: returns the configured limit of a service.

    Attributes:
        is_shedding: calls of a service without limits may be refused, because its clients give up.
    """

    def __init__(self, server: Limit = NO_LIMIT, limit_of: Callable[[str], Limit] = lambda _: NO_LIMIT) -> None:
        self._server = ServiceQueue("", server)
        self._limit_of = limit_of
        self._gates: dict[str, ServiceQueue] = {}
        self._busy: dict[str, ServiceQueue] = {}
        self._numbers = count()
        self._queued = 0
        self._shedding: dict[str, LoadShedding] = {}
        self.is_shedding = False

    @property
    def has_server_limit(self) -> bool:
        """True if all calls together are limited."""
        return bool(self._server.limit.max_concurrency)

    def in_flight(self, name: str) -> int:
        """Return the number of calls of a service in flight."""
        return self._gates[name].in_flight if name in self._gates else 0

    def queued(self, name: str) -> int:
        """Return the number of queued calls of a service."""
        return self._gates[name].queued if name in self._gates else 0

    async def enter(self, name: str, *, is_nested: bool = False, interface: Interface | None = None) -> AdmittedPlace:
        """Take a place for a call, first come, first served; the caller must release the place.

        Nested calls take no place of the server.  Not a checkpoint if a place is free; cancellation leaves the queue.
        ``interface`` is None for calls that are not shed, such as streams.

        Raises:
            Overloaded: the queue is full.
            QueueTimeExceeded: the call has waited too long, or would have to.
        """
        gate = self._gate(name)
        if self.is_shedding and interface is not None and (shedding := self._find_shedding(gate)) is not None:
            gives_up_at = shedding.check(interface, gate.in_flight)
            self._grant(gate, is_nested=is_nested)
            return AdmittedPlace(self, gate, is_nested, 0.0, lambda seconds: shedding.record_end(seconds, gives_up_at))
        waiter = self._grant_or_queue(gate, is_nested=is_nested)
        if waiter is None:
            return AdmittedPlace(self, gate, is_nested, 0.0)
        begun = perf_counter()
        most = self._max_queue_time(gate)
        with trio.move_on_after(most):
            await self._wait(gate, waiter, is_nested=is_nested)
        if not waiter.is_running:
            raise QueueTimeExceeded.after(most)
        return AdmittedPlace(self, gate, is_nested, perf_counter() - begun)

    async def follow_others(self) -> None:
        """Admit queued calls when other worker processes release places; without any, return at once."""

    def record_give_up(self, name: str, interface: Interface, seconds: float, counts: CallCounts) -> None:
        """Record that a client has given up on a call after ``seconds``; no effect on services with a limit."""
        if self.has_server_limit or self._limit_of(name).max_concurrency:
            return
        shedding = self._shedding.get(name)
        if shedding is None:
            shedding = self._shedding[name] = LoadShedding(name)
        shedding.record_give_up(interface, seconds, counts, self.in_flight(name))
        self.is_shedding = self.is_shedding or shedding.is_active

    def _find_shedding(self, gate: ServiceQueue) -> LoadShedding | None:
        """Return the active load shedding of a service, and end those that are due."""
        if self.has_server_limit or gate.limit.max_concurrency:
            self._shedding.pop(gate.name, None)
        for each in self._shedding.values():
            each.end_if_due()
        self.is_shedding = any(each.is_active for each in self._shedding.values())
        found = self._shedding.get(gate.name)
        return found if found is not None and found.is_active else None

    def around(self, lease: ServableLookup) -> ServableLookup:
        """Wrap a lease function of pipeline or graph nodes, so that their calls take places of their callees."""

        async def leased(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
            held = await lease(name, version)
            return self._admitting(held, name) if self._limit_of(name).max_concurrency else held

        return leased

    @contextmanager
    def _admitting(self, lease: AbstractContextManager[LeasedServable], name: str) -> Iterator[LeasedServable]:
        with lease as held:
            entering: Any = _AdmittingServable(self, name, held.servable)
            yield _ServableView(entering)

    def _gate(self, name: str) -> ServiceQueue:
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = ServiceQueue(name, NO_LIMIT)
        limit = self._limit_of(name)
        if limit != gate.limit:
            gate.limit = limit
            self._admit_waiting()
        return gate

    def _grant_or_queue(self, gate: ServiceQueue, *, is_nested: bool) -> QueuedCall | None:
        """Take a place and return None, or queue and return the waiter.

        Raises:
            Overloaded: the queue is full, or too long for the call to start in time.
        """
        if gate.has_place and (is_nested or (self._server.has_place and not gate.direct)):
            self._grant(gate, is_nested=is_nested)
            return None
        self._check_queue(gate, is_nested=is_nested)
        waiter = QueuedCall(next(self._numbers))
        queue = gate.nested if is_nested else gate.direct
        queue[waiter] = None
        self._queued += not is_nested
        self._busy[gate.name] = gate
        return waiter

    def _check_queue(self, gate: ServiceQueue, *, is_nested: bool) -> None:
        most = self._max_queue_time(gate)
        if not gate.has_place:
            gate.check(gate.queued + gate.elsewhere.waiting, most)
        elif not is_nested:
            self._server.check(self._queued + self._server.elsewhere.waiting, most)

    def _max_queue_time(self, gate: ServiceQueue) -> float:
        most = gate.limit.max_queue_time
        if most is None:
            most = self._server.limit.max_queue_time
        return math.inf if most is None else most

    async def _wait(self, gate: ServiceQueue, waiter: QueuedCall, *, is_nested: bool) -> None:
        try:
            await waiter.granted.wait()
            waiter.is_running = True
        except BaseException:
            if waiter.granted.is_set():
                self.leave(gate, is_nested=is_nested)
            else:
                self._withdraw(gate, waiter, is_nested=is_nested)
            raise

    def _withdraw(self, gate: ServiceQueue, waiter: QueuedCall, *, is_nested: bool) -> None:
        self._remove(gate, waiter, is_nested=is_nested)
        # This waiter may have been first in line for a place of the server.
        self._admit_waiting()

    def _remove(self, gate: ServiceQueue, waiter: QueuedCall, *, is_nested: bool) -> None:
        del (gate.nested if is_nested else gate.direct)[waiter]
        self._queued -= not is_nested
        if not gate.queued:
            self._busy.pop(gate.name, None)

    def _grant(self, gate: ServiceQueue, *, is_nested: bool) -> None:
        gate.in_flight += 1
        self._server.in_flight += not is_nested

    def leave(self, gate: ServiceQueue, *, is_nested: bool, seconds: float | None = None) -> None:
        """Release a place held for ``seconds``, and admit the next waiter."""
        self._release(gate, is_nested=is_nested, seconds=seconds)
        if self._busy:
            self._admit_waiting()

    def _release(self, gate: ServiceQueue, *, is_nested: bool, seconds: float | None) -> None:
        gate.in_flight -= 1
        self._server.in_flight -= not is_nested
        if seconds is not None:
            for each in (gate,) if is_nested else (gate, self._server):
                each.note(seconds)

    def _admit_waiting(self) -> None:
        while True:
            heads = [head for gate in self._busy.values() if (head := gate.head(self._server)) is not None]
            if not heads:
                return
            waiter, gate, is_nested = min(heads, key=lambda head: head[0].number)
            self._remove(gate, waiter, is_nested=is_nested)
            self._grant(gate, is_nested=is_nested)
            waiter.granted.set()


class AdmittedPlace:
    """The place of one call; a context manager that releases it.

    Attributes:
        waited_seconds: time in the queue.
    """

    __slots__ = ("_admission", "_gate", "_held", "_is_nested", "_on_end", "_taken_at", "waited_seconds")

    def __init__(
        self,
        admission: Admission,
        gate: ServiceQueue,
        is_nested: bool,
        waited_seconds: float,
        on_end: Callable[[float], None] | None = None,
    ) -> None:
        self._admission: Admission | None = admission
        self._gate = gate
        self._is_nested = is_nested
        self._taken_at = perf_counter()
        self._held: ConcurrencyLimit | None = None
        self._on_end = on_end
        self.waited_seconds = waited_seconds

    @property
    def name(self) -> str:
        """Name of the service."""
        return self._gate.name

    def hold(self, limit: ConcurrencyLimit) -> None:
        """Count the call against the service's own limit, until :meth:`pass_on` or :meth:`release`.

        Raises:
            TooManyRequests: the limit is reached.
        """
        limit.acquire()
        self._held = limit

    def pass_on(self) -> ConcurrencyLimit | None:
        """Transfer the count of :meth:`hold` to the caller; return None if there is none."""
        held, self._held = self._held, None
        return held

    def release(self) -> None:
        """Release the place; idempotent."""
        if (held := self.pass_on()) is not None:
            held.release()
        admission, self._admission = self._admission, None
        if admission is not None:
            seconds = perf_counter() - self._taken_at
            if self._on_end is not None:
                self._on_end(seconds)
            admission.leave(self._gate, is_nested=self._is_nested, seconds=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class QueuedCall:
    """A queued call; ``since`` is a ``time.monotonic`` time, ``is_running`` whether it has taken its place."""

    __slots__ = ("granted", "is_running", "number", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = monotonic()
        self.granted = trio.Event()
        self.is_running = False


_Head = tuple[QueuedCall, "ServiceQueue", bool]


class ServiceQueue:
    """Places and queue of one service, or of the server; ``elsewhere`` is the state in other worker processes."""

    __slots__ = ("direct", "elsewhere", "in_flight", "limit", "name", "nested", "seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        self.name = name
        self.limit = limit
        self.in_flight = 0
        self.elsewhere = NO_PEER_COUNTERS
        self.seconds = 0.0
        self.direct: OrderedDict[QueuedCall, None] = OrderedDict()
        self.nested: OrderedDict[QueuedCall, None] = OrderedDict()

    @property
    def has_place(self) -> bool:
        """True if one more call may start."""
        most = self.limit.max_concurrency
        return not most or self.in_flight + self.elsewhere.in_flight < most

    @property
    def queued(self) -> int:
        """Number of queued calls."""
        return len(self.direct) + len(self.nested)

    def head(self, server: ServiceQueue) -> _Head | None:
        """Return the first waiter that could start now, and whether it is nested."""
        if not self.has_place:
            return None
        heads: list[_Head] = [(next(iter(self.nested)), self, True)] if self.nested else []
        if self.direct and server.has_place:
            heads.append((next(iter(self.direct)), self, False))
        return min(heads, key=lambda head: head[0].number, default=None)

    def note(self, seconds: float) -> None:
        """Add a call time to the moving average."""
        self.seconds += (seconds - self.seconds) * (_AVERAGE_WEIGHT if self.seconds else 1.0)

    def check(self, queued: int, max_seconds: float) -> None:
        """Check that one more call may wait after ``queued`` others, and will start within ``max_seconds``.

        The estimated time until the queue is served is the ``Retry-After`` of a refusal.

        Raises:
            Overloaded: the queue is full.
            QueueTimeExceeded: the queue is too long.
        """
        most, longest, _ = self.limit
        wait_seconds = (queued + 1) * self.seconds / most
        if queued < longest and wait_seconds <= max_seconds:
            return
        seconds = max(1, math.ceil(wait_seconds))
        whose = f'"{self.name}"' if self.name else "the server"
        in_flight = self.in_flight + self.elsewhere.in_flight
        named = ("max_concurrency", "max_queue") if self.name else ("--max-concurrency", "--max-queue")
        state = f"{whose} has {in_flight} calls under way and {queued} waiting"
        if queued < longest:
            raise QueueTimeExceeded(
                f"{state}, so that a call would wait {wait_seconds:.3g} s, and may wait {max_seconds:g} s"
                f" (max_queue_time); try again in {seconds} s",
                retry_after_seconds=seconds,
            )
        raise Overloaded(
            f"{state}, and may have {most} ({named[0]}) and {longest} ({named[1]}); try again in {seconds} s",
            retry_after_seconds=seconds,
        )


class _ServableView:
    __slots__ = ("servable",)

    def __init__(self, servable: Servable) -> None:
        self.servable = servable


class _AdmittingServable:
    """A servable each of whose inferences takes a place."""

    __slots__ = ("_admission", "_name", "_servable")

    def __init__(self, admission: Admission, name: str, servable: Servable) -> None:
        self._admission = admission
        self._name = name
        self._servable = servable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servable, name)

    async def infer(self, request: InferRequest) -> InferResponse:
        with await self._admission.enter(self._name, is_nested=True) as place:
            if request.event is not None:
                request.event.queue_seconds += place.waited_seconds
            return await self._servable.infer(request)


def release_unless_named(called: str, name: bytes) -> None:
    """Release the place of a call if the decoded name differs from the first bytes."""
    if called.encode(errors="replace") != name:
        release_current_ticket()


# ----------------------------------------------------------------------
# Services with their own limit
# ----------------------------------------------------------------------


class ServiceLimits:
    """Tracks the loaded services that limit their calls themselves, as handler projects do.

    Attributes:
        limited: names of these services.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.limited: set[str] = set()
        for name in registry.statuses():
            self._update(name)
        registry.subscribe(self._on_status)

    def hold(self, name: str, place: AdmissionTicket) -> None:
        """Count a place against the service's own limit, if it has one.

        Raises:
            TooManyRequests: the limit is reached.
        """
        if name in self.limited and (limit := self._registry.concurrency_limit(name)) is not None:
            place.hold(limit)

    def _on_status(self, status: VersionStatus) -> None:
        self._update(status.name)

    def _update(self, name: str) -> None:
        limit = self._registry.concurrency_limit(name)
        if limit is not None and limit.maximum:
            self.limited.add(name)
        else:
            self.limited.discard(name)


def attach_place(lease: Lease, place: AdmissionTicket | None) -> None:
    """Attach a place, or the current one, to a lease."""
    lease.place = place
    taken = place or current_ticket.get()
    if taken is not None:
        lease.waited_seconds = taken.waited_seconds


def count_service_call(lease: Lease) -> None:
    """Count a call against its service's own limit until the lease is released, reusing the count of its place.

    Raises:
        TooManyRequests: the limit is reached.
    """
    if lease.concurrency_limit is None:
        return
    place = lease.place or current_ticket.get()
    held = None if place is None else place.pass_on()
    if held is None:
        held = lease.concurrency_limit
        held.acquire()
    lease.counted = held


# ----------------------------------------------------------------------
# Admission across worker processes: limits and queue lengths are counted over all of them
# ----------------------------------------------------------------------

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
                        row.write(gate.in_flight, queued, self._waiting_since(gate))

    def _row_of(self, gate: ServiceQueue) -> CounterRow | None:
        key = f"service {gate.name}" if gate.name else SERVER_COUNTER
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
