"""Loaded servables: who uses one, and that each is closed once, when nobody uses it any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.service import CountedService, OrderedService, SequenceServable

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.limits import CallPlace, ConcurrencyLimit
    from ovmstrio.core.service import Servable
    from ovmstrio.serving.kind import Takes

__all__ = ["Instance", "Lease", "RetiredInstances"]


@dataclass(slots=True, eq=False)
class Instance:
    """One loaded servable with the number of calls in flight.

    A version that is loaded again has a new instance; the old one lives until its last lease is given back.
    ``files`` is the mark of what it was loaded from, ``calls`` are the names that it calls, ``takes`` the calls that
    it takes, and ``remarks`` are what is odd with it; ``has_order`` is true where the order of requests matters, and
    ``concurrency_limit`` counts calls for a service that limits them itself.  ``drained`` is there once somebody waits
    to close it, and is set with the end of the last call in flight.
    """

    spec: ServableSpec
    version: str
    servable: Servable
    files: str
    calls: frozenset[str]
    takes: frozenset[Takes]
    remarks: tuple[Problem, ...] = ()
    name: str = field(init=False)
    kind: str = field(init=False)
    has_order: bool = field(init=False)
    concurrency_limit: ConcurrencyLimit | None = field(init=False)
    in_flight: int = 0
    drained: trio.Event | None = None

    def __post_init__(self) -> None:
        self.name, self.kind = self.spec.name, self.spec.kind
        service: object = self.servable
        keeps_order = isinstance(service, OrderedService) and service.keeps_order
        self.has_order = keeps_order or isinstance(self.servable, SequenceServable)
        self.concurrency_limit = service.concurrency_limit if isinstance(service, CountedService) else None

    async def wait_drained(self) -> None:
        """Return once no call is in flight; whoever waits has seen to it that no new lease is given.

        Cancellation: at once; nothing is held.
        """
        if self.in_flight:
            self.drained = self.drained or trio.Event()
            await self.drained.wait()


class Lease:
    """The right to call one servable, which stays open until the lease is given back by leaving its ``with`` block.

    ``place`` is given back with it, if the call has taken one; ``waited_seconds`` is how long it waited for a place.
    So is the call's count, if it has one, by what is ``counted``.
    """

    __slots__ = (
        "_instance",
        "concurrency_limit",
        "counted",
        "has_order",
        "kind",
        "name",
        "place",
        "servable",
        "takes",
        "version",
        "waited_seconds",
    )

    def __init__(self, instance: Instance) -> None:
        instance.in_flight += 1
        self._instance = instance
        self.name = instance.name
        self.version = instance.version
        self.kind = instance.kind
        self.takes = instance.takes
        self.has_order = instance.has_order
        self.concurrency_limit = instance.concurrency_limit
        self.counted: ConcurrencyLimit | None = None
        self.servable = instance.servable
        self.place: CallPlace | None = None
        self.waited_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the lease back, and the place that was taken with it, where no block does."""
        instance = self._instance
        instance.in_flight -= 1
        if instance.drained is not None and not instance.in_flight:
            instance.drained.set()
        if self.counted is not None:
            self.counted.give_back()
        if self.place is not None:
            self.place.release()


log = structlog.get_logger(__name__)

CLOSE_SECONDS: Final = 10.0
"""How long one servable may take to give back what it holds, cancelled or not."""


@dataclass(slots=True)
class _Retired:
    """An instance's end: what is to be called then, and the ends that it waits for."""

    closed: Callable[[], None] | None
    callers: tuple[trio.Event, ...]
    ended: trio.Event = field(default_factory=trio.Event)


class RetiredInstances:
    """The instances that get no more calls and are not closed yet; each is closed after those that call it."""

    def __init__(self) -> None:
        self._open: dict[Instance, _Retired] = {}

    def add(self, instance: Instance, closed: Callable[[], None] | None) -> None:
        """Take over an instance that gets no more calls; ``closed`` is called once it is closed.

        Only callers that were retired before it are waited for, so that no two wait for each other.
        """
        callers = tuple(retired.ended for other, retired in self._open.items() if instance.name in other.calls)
        self._open[instance] = _Retired(closed, callers)

    async def close_when_idle(self, instance: Instance) -> None:
        """Close a retired instance when its last call has ended.

        Raises: nothing that the servable raises; that is logged.

        Cancellation: while calls are in flight, which leaves the instance open for :meth:`close_all`; closing itself
        is shielded, with a bound.
        """
        await instance.wait_drained()
        retired = self._open[instance]
        for ended in retired.callers:
            await ended.wait()
        await self._close(instance)
        # What it calls may be closed now.
        del self._open[instance]
        retired.ended.set()
        log.info("retired", kind=instance.spec.kind, name=instance.name, version=instance.version)
        if retired.closed is not None:
            retired.closed()

    async def _close(self, instance: Instance) -> None:
        with trio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
            try:
                await instance.servable.aclose()
            except Exception:
                log.exception("closing failed", name=instance.name, version=instance.version)
        if scope.cancelled_caught:
            log.error("closing took too long", name=instance.name, version=instance.version, seconds=CLOSE_SECONDS)

    async def close_all(self, seconds: float) -> None:
        """Close everything that is retired, each when its calls have ended; no other task may be closing any more.

        An instance whose calls do not end in ``seconds`` is left open: closing it under a running call could crash
        the process.

        Cancellation: shielded, with that bound.
        """
        with trio.move_on_after(seconds, shield=True):
            async with trio.open_nursery() as nursery:
                for instance in tuple(self._open):
                    nursery.start_soon(self.close_when_idle, instance)
        for instance in self._open:
            log.warning(
                "abandoned",
                kind=instance.spec.kind,
                name=instance.name,
                version=instance.version,
                in_flight=instance.in_flight,
            )
