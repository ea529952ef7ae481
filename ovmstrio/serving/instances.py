"""Instances of loaded services: leases that count calls in flight, and closing after the last lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.service import LimitedService, OrderedService, SequenceServable

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.limits import AdmissionTicket, ConcurrencyLimit
    from ovmstrio.core.service import Detection, Servable
    from ovmstrio.serving.kind import CallType


@dataclass(slots=True, eq=False)
class Instance:
    """One loaded service with the number of calls in flight; a reload creates a new instance.

    Attributes:
        files: fingerprint of the files it was loaded from.
        calls: names of its callees.
        warnings: load-time warnings.
        detections: settings that loading detected.
        has_order: whether the order of requests matters.
        concurrency_limit: call counter of a service that limits itself.
        drained: set at the end of the last call, once a task waits to close the instance.
    """

    spec: ServableSpec
    version: str
    servable: Servable
    files: str
    calls: frozenset[str]
    call_types: frozenset[CallType]
    warnings: tuple[Problem, ...] = ()
    detections: tuple[Detection, ...] = ()
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
        self.concurrency_limit = service.concurrency_limit if isinstance(service, LimitedService) else None

    async def wait_drained(self) -> None:
        """Return once no call is in flight; the caller must prevent new leases."""
        if self.in_flight:
            self.drained = self.drained or trio.Event()
            await self.drained.wait()


class Lease:
    """The right to call one service, until the ``with`` block ends; the service stays open until then.

    Releasing it also releases its ``place`` and the count in ``counted``; ``waited_seconds`` is the time in the queue.
    """

    __slots__ = (
        "_instance",
        "call_types",
        "concurrency_limit",
        "counted",
        "has_order",
        "kind",
        "name",
        "place",
        "servable",
        "version",
        "waited_seconds",
    )

    def __init__(self, instance: Instance) -> None:
        instance.in_flight += 1
        self._instance = instance
        self.name = instance.name
        self.version = instance.version
        self.kind = instance.kind
        self.call_types = instance.call_types
        self.has_order = instance.has_order
        self.concurrency_limit = instance.concurrency_limit
        self.counted: ConcurrencyLimit | None = None
        self.servable = instance.servable
        self.place: AdmissionTicket | None = None
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
        """Release the lease, its place and its count, where no ``with`` block does."""
        instance = self._instance
        instance.in_flight -= 1
        if instance.drained is not None and not instance.in_flight:
            instance.drained.set()
        if self.counted is not None:
            self.counted.release()
        if self.place is not None:
            self.place.release()


log = structlog.get_logger(__name__)

CLOSE_SECONDS: Final = 10.0
"""Time limit for closing one service, also under cancellation."""


@dataclass(slots=True)
class _Retired:
    """A retired instance: its callback, and the events of callers that must close before."""

    closed: Callable[[], None] | None
    callers: tuple[trio.Event, ...]
    ended: trio.Event = field(default_factory=trio.Event)


class RetiredInstances:
    """Instances that get no more calls and are not closed yet; callers are closed before their callees."""

    def __init__(self) -> None:
        self._retired: dict[Instance, _Retired] = {}

    def add(self, instance: Instance, closed: Callable[[], None] | None) -> None:
        """Add a retired instance; ``closed`` is called once it is closed.

        It waits only for callers retired before, so that no two instances wait for each other.
        """
        callers = tuple(retired.ended for other, retired in self._retired.items() if instance.name in other.calls)
        self._retired[instance] = _Retired(closed, callers)

    async def close_when_idle(self, instance: Instance) -> None:
        """Close a retired instance when its last call has ended; close errors are logged.

        Cancellation leaves the instance to :meth:`close_all`; the close itself is shielded and bounded.
        """
        await instance.wait_drained()
        retired = self._retired[instance]
        for ended in retired.callers:
            await ended.wait()
        await self._close(instance)

        del self._retired[instance]
        retired.ended.set()
        log.info("service retired", kind=instance.spec.kind, name=instance.name, version=instance.version)
        if retired.closed is not None:
            retired.closed()

    async def _close(self, instance: Instance) -> None:
        with trio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
            try:
                await instance.servable.aclose()
            except Exception:
                log.exception("service close failed", name=instance.name, version=instance.version)
        if scope.cancelled_caught:
            log.error("service close timed out", name=instance.name, version=instance.version, seconds=CLOSE_SECONDS)

    async def close_all(self, seconds: float) -> None:
        """Close all retired instances when idle; shielded and bounded by ``seconds``.

        An instance with calls after that time stays open: closing it under a running call could crash the process.
        """
        with trio.move_on_after(seconds, shield=True):
            async with trio.open_nursery() as nursery:
                for instance in tuple(self._retired):
                    nursery.start_soon(self.close_when_idle, instance)
        for instance in self._retired:
            log.warning(
                "service left open, calls still running",
                kind=instance.spec.kind,
                name=instance.name,
                version=instance.version,
                in_flight=instance.in_flight,
            )
