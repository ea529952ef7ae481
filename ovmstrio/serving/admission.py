"""Who may call a service now, who waits, and who is refused.

::

    call ──> enter ──┬─ a place of the service's, and one of the server's ──> under way ──> release
                     ├─ wait in the service's queue, holding nothing            ^              │
                     └─ refused: the queue is full                              └── the first whose places are free

A call that a pipeline or a graph makes for one that is under way needs a place of what it calls, and none of the
server's, and goes before those that wait for the server alone.  So whoever holds a place waits for places further down
the calls alone, which have no circles, and never for one that is held by who waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import contextmanager
from itertools import count
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from ovmstrio.core.errors import Overloaded
from ovmstrio.core.limits import NO_LIMIT, Limit, current_place
from ovmstrio.core.worker_peers import NOTHING_ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ovmstrio.core.limits import CallPlace, ConcurrencyLimit
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.core.service import LeasedServable, LeaseServable, Servable
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.serving.registry import Registry

__all__ = ["Admission", "AdmittedPlace", "OwnLimits", "Turnstile", "Waiter", "count_call", "give_place"]

# ----------------------------------------------------------------------
# Who may call a service now, who waits, and who is refused
# ----------------------------------------------------------------------

_WEIGHT: Final = 0.1
"""Of the last call, in the time that calls have taken of late."""


class Admission:
    """The places of one server and of its services.

    Args:
        server: the limit of all calls together.
        limit_of: gives that of a service, as it is configured now.
    """

    def __init__(self, server: Limit = NO_LIMIT, limit_of: Callable[[str], Limit] = lambda _: NO_LIMIT) -> None:
        self._server = Turnstile("", server)
        self._limit_of = limit_of
        self._gates: dict[str, Turnstile] = {}
        self._busy: dict[str, Turnstile] = {}
        self._numbers = count()
        self._queued = 0

    @property
    def has_server_limit(self) -> bool:
        """Whether there is a limit for all calls together."""
        return bool(self._server.limit.max_concurrency)

    def under_way(self, name: str) -> int:
        """Count the calls of a service that have a place."""
        return self._gates[name].under_way if name in self._gates else 0

    def queued(self, name: str) -> int:
        """Count the calls of a service that wait."""
        return self._gates[name].queued if name in self._gates else 0

    async def enter(self, name: str, *, is_nested: bool = False) -> AdmittedPlace:
        """Take a place for a call, which must be released; first come, first served.

        Args:
            name: of a service that there is.
            is_nested: whether the call is made for one that has a place of the server's.

        Raises:
            Overloaded: the call would have to wait, and as many wait as may.

        Cancellation: while it waits; it leaves the queue.  Not a checkpoint if there is a place.
        """
        gate = self._gate(name)
        waiter = self._grant_or_queue(gate, is_nested=is_nested)
        if waiter is None:
            return AdmittedPlace(self, gate, is_nested, 0.0)
        begun = perf_counter()
        await self._wait(gate, waiter, is_nested=is_nested)
        return AdmittedPlace(self, gate, is_nested, perf_counter() - begun)

    async def follow_others(self) -> None:
        """Let calls go on for which there is room because of what other processes do; here there are none.

        Cancellation: at once.
        """

    def around(self, lease: LeaseServable) -> LeaseServable:
        """Have calls that nodes of pipelines and graphs make take places of what they call."""

        async def leased(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
            held = await lease(name, version)
            return self._entering(held, name) if self._limit_of(name).max_concurrency else held

        return leased

    @contextmanager
    def _entering(self, lease: AbstractContextManager[LeasedServable], name: str) -> Iterator[LeasedServable]:
        with lease as held:
            entering: Any = _Entering(self, name, held.servable)
            yield _Lent(entering)

    def _gate(self, name: str) -> Turnstile:
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = Turnstile(name, NO_LIMIT)
        limit = self._limit_of(name)
        if limit != gate.limit:
            gate.limit = limit
            self._let_in()
        return gate

    def _grant_or_queue(self, gate: Turnstile, *, is_nested: bool) -> Waiter | None:
        """Take a place, or one in the queue; None if there was a place.

        Raises:
            Overloaded: as many wait as may.
        """
        if gate.has_place and (is_nested or (self._server.has_place and not gate.direct)):
            self._grant(gate, is_nested=is_nested)
            return None
        self._check_queue(gate, is_nested=is_nested)
        waiter = Waiter(next(self._numbers))
        queue = gate.nested if is_nested else gate.direct
        queue[waiter] = None
        self._queued += not is_nested
        self._busy[gate.name] = gate
        return waiter

    def _check_queue(self, gate: Turnstile, *, is_nested: bool) -> None:
        if not gate.has_place:
            queued = gate.queued + gate.elsewhere.waiting
            if queued >= gate.limit.max_queue:
                raise gate.refusal(queued)
        elif not is_nested:
            queued = self._queued + self._server.elsewhere.waiting
            if queued >= self._server.limit.max_queue:
                raise self._server.refusal(queued)

    async def _wait(self, gate: Turnstile, waiter: Waiter, *, is_nested: bool) -> None:
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self.leave(gate, is_nested=is_nested)
            else:
                self._withdraw(gate, waiter, is_nested=is_nested)
            raise

    def _withdraw(self, gate: Turnstile, waiter: Waiter, *, is_nested: bool) -> None:
        """Take a call out of its queue."""
        self._remove(gate, waiter, is_nested=is_nested)
        # It may have been the one whose turn it was to wait for the server.
        self._let_in()

    def _remove(self, gate: Turnstile, waiter: Waiter, *, is_nested: bool) -> None:
        del (gate.nested if is_nested else gate.direct)[waiter]
        self._queued -= not is_nested
        if not gate.queued:
            self._busy.pop(gate.name, None)

    def _grant(self, gate: Turnstile, *, is_nested: bool) -> None:
        gate.under_way += 1
        self._server.under_way += not is_nested

    def leave(self, gate: Turnstile, *, is_nested: bool, seconds: float | None = None) -> None:
        """Take a place back that was held for so long, and let in who waits for it."""
        self._take_back(gate, is_nested=is_nested, seconds=seconds)
        if self._busy:
            self._let_in()

    def _take_back(self, gate: Turnstile, *, is_nested: bool, seconds: float | None) -> None:
        gate.under_way -= 1
        self._server.under_way -= not is_nested
        if seconds is not None:
            for each in (gate,) if is_nested else (gate, self._server):
                each.note(seconds)

    def _let_in(self) -> None:
        while True:
            heads = [head for gate in self._busy.values() if (head := gate.head(self._server)) is not None]
            if not heads:
                return
            waiter, gate, is_nested = min(heads, key=lambda head: head[0].number)
            self._remove(gate, waiter, is_nested=is_nested)
            self._grant(gate, is_nested=is_nested)
            waiter.granted.set()


class AdmittedPlace:
    """The place of one call; a context manager that gives it back.

    Attributes:
        waited_seconds: how long it was waited for.
    """

    __slots__ = ("_admission", "_gate", "_held", "_is_nested", "_taken_at", "waited_seconds")

    def __init__(self, admission: Admission, gate: Turnstile, is_nested: bool, seconds: float) -> None:
        self._admission: Admission | None = admission
        self._gate = gate
        self._is_nested = is_nested
        self._taken_at = perf_counter()
        self._held: ConcurrencyLimit | None = None
        self.waited_seconds = seconds

    @property
    def name(self) -> str:
        """The service's."""
        return self._gate.name

    def hold(self, limit: ConcurrencyLimit) -> None:
        """Have the call count among those that its service allows itself, too, until that is passed on or given back.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        limit.take()
        self._held = limit

    def pass_on(self) -> ConcurrencyLimit | None:
        """Leave it to the caller to give back what is held; None if there is nothing."""
        held, self._held = self._held, None
        return held

    def release(self) -> None:
        """Give the place back; may be called again."""
        if (held := self.pass_on()) is not None:
            held.give_back()
        admission, self._admission = self._admission, None
        if admission is not None:
            seconds = perf_counter() - self._taken_at
            admission.leave(self._gate, is_nested=self._is_nested, seconds=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Waiter:
    """A call in a queue, since a time of ``time.monotonic``."""

    __slots__ = ("granted", "number", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = monotonic()
        self.granted = trio.Event()


_Head = tuple[Waiter, "Turnstile", bool]


class Turnstile:
    """The places of one service, or of the server, and who waits for them; ``elsewhere`` is so in other processes."""

    __slots__ = ("direct", "elsewhere", "limit", "name", "nested", "seconds", "under_way")

    def __init__(self, name: str, limit: Limit) -> None:
        self.name = name
        self.limit = limit
        self.under_way = 0
        self.elsewhere = NOTHING_ELSEWHERE
        self.seconds = 0.0
        self.direct: OrderedDict[Waiter, None] = OrderedDict()
        self.nested: OrderedDict[Waiter, None] = OrderedDict()

    @property
    def has_place(self) -> bool:
        """Whether one more may be under way."""
        most = self.limit.max_concurrency
        return not most or self.under_way + self.elsewhere.under_way < most

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self.direct) + len(self.nested)

    def head(self, server: Turnstile) -> _Head | None:
        """Give the first who could go on now, and whether it is nested."""
        if not self.has_place:
            return None
        heads: list[_Head] = [(next(iter(self.nested)), self, True)] if self.nested else []
        if self.direct and server.has_place:
            heads.append((next(iter(self.direct)), self, False))
        return min(heads, key=lambda head: head[0].number, default=None)

    def note(self, seconds: float) -> None:
        """Note how long a call has taken."""
        self.seconds += (seconds - self.seconds) * (_WEIGHT if self.seconds else 1.0)

    def refusal(self, queued: int) -> Overloaded:
        """Refuse one more: by then those before it will have been answered, as far as one can tell."""
        most, longest = self.limit
        seconds = max(1, math.ceil((queued + 1) * self.seconds / most))
        whose = f'"{self.name}"' if self.name else "the server"
        under_way = self.under_way + self.elsewhere.under_way
        options = "max_concurrency", "max_queue"
        concurrency, queue = options if self.name else (f"--{option}" for option in options)
        return Overloaded(
            f"{whose} has {under_way} calls under way and {queued} waiting, and may have {most} ({concurrency})"
            f" and {longest} ({queue}); try again in {seconds} s",
            retry_after_seconds=seconds,
        )


class _Lent:
    """What nodes get of a lease."""

    __slots__ = ("servable",)

    def __init__(self, servable: Servable) -> None:
        self.servable = servable


class _Entering:
    """A servable each of whose calls takes a place; all else is its own."""

    __slots__ = ("_admission", "_name", "_servable")

    def __init__(self, admission: Admission, name: str, servable: Servable) -> None:
        self._admission = admission
        self._name = name
        self._servable = servable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servable, name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call when there is a place; raises ``Overloaded`` if too many wait, and as the servable."""
        with await self._admission.enter(self._name, is_nested=True) as place:
            if request.event is not None:
                request.event.queue_seconds += place.waited_seconds
            return await self._servable.infer(request)


# ----------------------------------------------------------------------
# Services that limit their calls themselves, as handler projects do over all their processes, with no queue
# ----------------------------------------------------------------------


class OwnLimits:
    """Which services that are loaded now have a limit of their own.

    Args:
        registry: has them.

    Attributes:
        limited: the names of those whose limit says a number.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.limited: set[str] = set()
        for name in registry.statuses():
            self._look(name)
        registry.subscribe(self._follow)

    def hold(self, name: str, place: CallPlace) -> None:
        """Have a place count among those that a service allows itself, if it is loaded.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        if name in self.limited and (limit := self._registry.concurrency_limit(name)) is not None:
            place.hold(limit)

    def _follow(self, status: VersionStatus) -> None:
        self._look(status.name)

    def _look(self, name: str) -> None:
        limit = self._registry.concurrency_limit(name)
        if limit is not None and limit.maximum:
            self.limited.add(name)
        else:
            self.limited.discard(name)


def give_place(lease: Lease, place: CallPlace | None) -> None:
    """Give a lease the place that was taken for its call, now or before."""
    lease.place = place
    taken = place or current_place.get()
    if taken is not None:
        lease.waited_seconds = taken.waited_seconds


def count_call(lease: Lease) -> None:
    """Count a call among those that its service allows itself, until the lease is given back; its place may be so.

    Raises:
        TooManyRequests: there are as many as may be.
    """
    if lease.concurrency_limit is None:
        return
    place = lease.place or current_place.get()
    held = None if place is None else place.pass_on()
    if held is None:
        held = lease.concurrency_limit
        held.take()
    lease.counted = held
