"""Registry: maps names and versions to servables, and changes them while calls are in flight.

::

    apply / rescan / watcher ──> JobQueue ──> Reconciler ──> VersionLoader ──> ServiceRecord (states, routing)
    lease ─────────────────────────────────────────────────────────────────────────^   │ replaced, retired
                                                        RetiredInstances (close when idle) <──┘
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

from ovmstrio.core.errors import InvalidRequest, NotReady, ServiceMissing
from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.core.service import on_readiness_changed
from ovmstrio.serving.instances import Instance, Lease, RetiredInstances
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.loading import (
    ChangeDetector,
    Reconciler,
    VersionLoader,
    retirement_order,
    run_in_load_order,
    update_dependencies,
)
from ovmstrio.serving.mirrors import Mirrors
from ovmstrio.serving.periodic_check import PeriodicCheck
from ovmstrio.serving.records import DEFAULT_VERSION, ApplyResult, Readiness, ServiceRecord, VersionState, VersionStatus
from ovmstrio.util.cores import CORES
from ovmstrio.util.load_limit import LOADS_AT_ONCE
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.service import Detection, Introspection, Servable, ServableLookup
    from ovmstrio.serving.kind import CallType, Kind

# ----------------------------------------------------------------------
# Change queue
# ----------------------------------------------------------------------


class RegistryChange:
    """One queued change of the registry; ``begun`` is true once it runs and others may no longer join it."""

    def __init__(self, work: Callable[[], Awaitable[ApplyResult]]) -> None:
        self.begun = False
        self._work = work
        self._done = trio.Event()
        self._result: ApplyResult | None = None

    async def run(self) -> None:
        """Do the work and wake the waiting tasks."""
        self.begun = True
        self._result = await self._work()
        self._done.set()

    def abandon(self) -> None:
        """Wake the waiting tasks without a result."""
        self._done.set()

    async def wait(self) -> ApplyResult:
        """Return the result once the work is done; the work survives cancellation.

        Raises:
            NotReady: the registry has stopped.
        """
        await self._done.wait()
        if self._result is None:
            raise NotReady("the server is shutting down")
        return self._result


class ChangeQueue:
    """Runs changes one after the other, in the order of their requests."""

    def __init__(self) -> None:
        self._sender, self._receiver = trio.open_memory_channel[RegistryChange](math.inf)
        self._open: set[RegistryChange] = set()
        self._closed = False

    def put(self, work: Callable[[], Awaitable[ApplyResult]]) -> RegistryChange:
        """Queue a change; a closed queue abandons it at once."""
        job = RegistryChange(work)
        if self._closed:
            job.abandon()
        else:
            self._open.add(job)
            self._sender.send_nowait(job)
        return job

    async def run(self) -> None:
        """Run queued changes until cancelled; cancellation abandons all queued and later changes."""
        try:
            async for job in self._receiver:
                await job.run()
                self._open.remove(job)
        finally:
            self._closed = True
            for job in self._open:
                job.abandon()


# ----------------------------------------------------------------------
# Readiness
# ----------------------------------------------------------------------


ReadyRequires = Literal["all", "started", "none"]
"""Services that readiness requires: all that were configured at the start, those that have been available, or none."""


def startup_readiness(services: Collection[ServiceRecord], kinds: Iterable[str]) -> Readiness | None:
    """Return the progress of the first configuration pass; None once no required service is left to load."""
    waiting = sorted(record.name for record in services if record.is_required and not record.settled)
    if not services:
        return Readiness(ready=False, reason="the configuration has not been applied yet")
    if not waiting:
        return None
    names = ", ".join(waiting[:5]) + (", ..." if len(waiting) > len(waiting[:5]) else "")
    return Readiness(
        ready=False, reason=f"loading {len(waiting)} of {len(services)} {_kind_names(services, kinds)}: {names}"
    )


def current_readiness(services: Collection[ServiceRecord], *, when_empty: bool) -> Readiness:
    """Return whether no expected service is missing.

    A service added to a running server is not expected before it is available, so that a wrong entry does not take the
    server out of rotation.
    """
    if not when_empty and all(record.spec is None for record in services):
        return Readiness(ready=False, reason="no model is configured")
    expected = [record for record in services if record.is_required and record.is_expected]
    reasons = [reason for record in expected for reason in _unready_reasons(record)]
    return Readiness(ready=not reasons, reason="; ".join(reasons))


def _unready_reasons(record: ServiceRecord) -> list[str]:
    """Return why calls of a service fail now; empty if it is available."""
    if not record.serving:
        return [f'{record.kind.name} "{record.name}": {unavailable_reason(record)}']
    reasons = (record.kind.unready_reason(instance.servable) for instance in {*record.serving.values()})
    return [reason for reason in reasons if reason]


def _kind_names(services: Collection[ServiceRecord], kinds: Iterable[str]) -> str:
    *first, last = [f"{name}s" for name in dict.fromkeys(kinds) if any(record.kind.name == name for record in services)]
    return f"{', '.join(first)} and {last}" if first else last


def unavailable_reason(record: ServiceRecord) -> str:
    """Return why no version of a service is available."""
    reasons = [
        f"version {each.version}: {each.reason}" for each in record.versions.values() if each.failure is not None
    ]
    return record.problem or "; ".join(reasons) or "; ".join(record.warnings) or "no version is available"


# ----------------------------------------------------------------------
# The registry
# ----------------------------------------------------------------------

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_VERSION: Final = 2**63 - 1


class Registry:
    """Everything that can be called by name.

    Args:
        kinds: service kinds by name, in listing order.
        make_context: creates the load context from ``lease`` and the nursery for background tasks of services.
        poll_seconds: interval of checks for changed files; 0 disables them.
        concurrent_loads: how many versions may load at once.
        load_wait_seconds: how long a lease waits for a version that is loading.
        shutdown_seconds: how long :meth:`run` waits for calls in flight at the end.
        ready_requires: services that :attr:`readiness` requires; with ``none`` it does not wait for loads either.
        ready_when_empty: ready even if nothing is configured.
        store_poll_seconds: interval of checks for changes in remote stores; 0 downloads once.
        download_cache_bytes: size above which downloads of earlier services are removed.

    Attributes:
        has_limits: whether any configured service has a concurrency limit.
        mirrors: local copies of remote models.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind[Any]],
        make_context: Callable[[ServableLookup, trio.Nursery], LoadContext] = LoadContext,
        *,
        poll_seconds: float = 1.0,
        concurrent_loads: int = LOADS_AT_ONCE,
        load_wait_seconds: float = 10.0,
        shutdown_seconds: float = 10.0,
        ready_requires: ReadyRequires = "all",
        ready_when_empty: bool = False,
        store_poll_seconds: float = 60.0,
        download_cache_bytes: float = math.inf,
    ) -> None:
        self.kinds = kinds
        self._make_context = make_context
        self._context: LoadContext | None = None
        self._poll_seconds = poll_seconds
        self.load_wait_seconds = load_wait_seconds
        self._shutdown_seconds = shutdown_seconds
        self._ready_requires = ready_requires
        self._ready_when_empty = ready_when_empty
        self._expected_by_peers: frozenset[str] | None = None
        self.has_limits = False
        self._services: dict[str, ServiceRecord] = {}
        self._retired = RetiredInstances()
        marks = ChangeDetector(self._services)
        loader = VersionLoader(lambda: self._context, marks, concurrent_loads)
        self.mirrors = Mirrors(self._poll, poll_seconds=store_poll_seconds, cache_bytes=download_cache_bytes)
        self._reconciler = Reconciler(loader, marks, self._retire, self.mirrors.unready_reason)
        self._jobs = ChangeQueue()
        self._queued_rescan: RegistryChange | None = None
        self._nursery: trio.Nursery | None = None
        self._stopped = False
        self._loaded = trio.Event()
        self._changed = trio.Event()
        self._announced = self.readiness
        self._on_status: list[Callable[[VersionStatus], None]] = []
        self._on_readiness: list[Callable[[Readiness], None]] = []
        self._poll_callbacks: list[Callable[[], Awaitable[object]]] = []

    # Life cycle
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run loads, the file watcher, retirements and background tasks of services until cancelled; callable once.

        Cancellation cancels loads, waits a bounded time for calls in flight, closes all services, and cancels their
        background tasks last.
        """
        with on_readiness_changed(self._announce_readiness):
            async with trio.open_nursery() as outer:
                services = await outer.start(_run_services)
                self._context = self._make_context(self.lease, services)
                try:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        await nursery.start(self.mirrors.run)
                        nursery.start_soon(self._jobs.run)
                        if self._poll_seconds > 0:
                            nursery.start_soon(self._watch)
                        task_status.started()
                finally:
                    await self._shut_down()
                    services.cancel_scope.cancel()

    @property
    def context(self) -> LoadContext:
        """The load context.

        Raises:
            NotReady: the registry is not running.
        """
        if self._context is None:
            raise NotReady("the server is not running")
        return self._context

    async def apply(self, specs: Sequence[ServableSpec]) -> ApplyResult:
        """Load, swap and retire until exactly these services are served; of two with one name the first counts.

        Calls to the new names wait from the start of this.  Failures are in the result; a failed service's old version
        stays. The change survives cancellation.

        Raises:
            NotReady: the registry has stopped.
        """
        return await self._jobs.put(partial(self._apply, tuple(specs))).wait()

    async def rescan(self) -> ApplyResult:
        """List all version directories again and retry failed loads; like :meth:`apply`.

        Concurrent calls share one queued rescan.

        Raises:
            NotReady: the registry has stopped.
        """
        self.mirrors.request_check()
        if self._queued_rescan is None or self._queued_rescan.begun:
            self._queued_rescan = self._jobs.put(partial(self._reconcile_all, forced=True))
        return await self._queued_rescan.wait()

    def begin_drain(self) -> None:
        """Make services refuse their queued calls, because the server is shutting down."""
        for record in self._services.values():
            for instance in {*record.serving.values()}:
                record.kind.begin_drain(instance.servable)

    @property
    def has_loaded(self) -> bool:
        """True if the first :meth:`apply` has ended, successful or not."""
        return self._loaded.is_set()

    async def wait_loaded(self) -> None:
        """Return once the first :meth:`apply` has ended, successful or not."""
        await self._loaded.wait()

    # Calls

    async def lease(self, name: str, version: str = "") -> Lease:
        """Lease a version, or the default one, for use in a ``with`` statement.

        An available version is leased without a checkpoint; a loading one is waited for.

        Raises:
            NotFound: the name or version is unknown.
            VersionRetired: the version is retired.
            VersionLoading: the version was not loaded within ``load_wait_seconds``.
            InvalidRequest: the version is not a number.
            NotReady: the registry has stopped.
        """
        return self.lease_now(name, version) or await self._lease_later(name, parse_version(version))

    def lease_now(self, name: str, version: str = "") -> Lease | None:
        """Lease a version, or the default one, if it is available; otherwise return None."""
        service = self._services.get(name)
        instance = None if service is None else service.serving.get(version)
        return None if instance is None else Lease(instance)

    def peek(self, name: str, version: str = "") -> Servable:
        """Return the servable of a version, or of the default one, without a lease, for immediate use of its metadata.

        Raises:
            NotFound: the name or version is unknown, or (``VersionRetired``) retired.
            VersionLoading: the version is not loaded yet.
            InvalidRequest: the version is not a number.
        """
        return self._find(name, parse_version(version)).servable

    def call_types(self, name: str, version: str = "") -> frozenset[CallType]:
        """Return the call types of a version, or of the default one; raises as :meth:`peek`."""
        return self._find(name, parse_version(version)).call_types

    def is_ready(self, name: str, version: str = "") -> bool:
        """Return True if a version, or the default one for an empty string, is available.

        Raises:
            NotFound: the name or version is unknown, or no version is available as default; "0" is always unknown.
            InvalidRequest: the version is not a number.
        """
        number = parse_version(version)
        service = self._record_of(name)
        record = service.record(number)
        if record is not None:
            return record.instance is not None
        if version == "" and service.serving:
            return True
        raise service.missing(number)

    def available_versions(self, name: str) -> list[int]:
        """Return the available versions of a name, ascending; empty for an unknown name."""
        service = self._services.get(name)
        return [] if service is None else service.available_versions()

    # Introspection
    def version_statuses(self, name: str, version: int = DEFAULT_VERSION) -> list[VersionStatus]:
        """Return the state of one version, or of all ever seen, ascending, for version 0.

        Raises:
            NotFound: the name or version is unknown.
        """
        service = self._record_of(name)
        if version == DEFAULT_VERSION:
            return service.statuses()
        record = service.record(version)
        if record is None:
            raise service.missing(version)
        return [record.status]

    def kind_of(self, name: str) -> str:
        """Return the current or last kind of a name; empty for an unknown name."""
        service = self._services.get(name)
        return "" if service is None else service.kind.name

    def limit_of(self, name: str) -> Limit:
        """Return the configured concurrency limit of a service; no limit for an unknown name."""
        service = self._services.get(name)
        spec = None if service is None else service.spec
        return NO_LIMIT if spec is None else Limit(spec.max_concurrency, spec.max_queue, spec.max_queue_time)

    def concurrency_limit(self, name: str) -> ConcurrencyLimit | None:
        """Return the call counter of a loaded service that limits itself, otherwise None."""
        service = self._services.get(name)
        instance = None if service is None else service.find(DEFAULT_VERSION)
        return None if instance is None else instance.concurrency_limit

    def knows(self, name: str) -> bool:
        """Return True if a name is or was configured."""
        return name in self._services

    def names_of(self, kind: str) -> frozenset[str]:
        """Return the configured names of a kind, loaded or not."""
        models = self._services.items()
        return frozenset(name for name, service in models if service.spec is not None and service.kind.name == kind)

    def in_flight(self) -> dict[str, int]:
        """Return the number of calls in flight by name, without zeros."""
        counted = {}
        for name, service in self._services.items():
            number = sum(each.in_flight for each in {*service.serving.values()})
            if number:
                counted[name] = number
        return counted

    def look_inside(self, name: str, version: str = "") -> Introspection:
        """Return the inspection of a version, or of the default one; raises as :meth:`peek`."""
        instance = self._find(name, parse_version(version))
        kind = self.kinds[instance.spec.kind]
        return kind.look_inside(instance.spec, instance.servable)

    def detections(self, name: str, version: str = "") -> tuple[Detection, ...]:
        """Return the settings that loading a version detected, or the default one; raises as :meth:`peek`."""
        return self._find(name, parse_version(version)).detections

    def findings(self) -> list[Problem]:
        """Return all problems of the configuration with their places."""
        return [problem for record in self._services.values() if record.spec for problem in record.findings]

    def failed_versions(self) -> list[list[Any]]:
        """Return name and version of each configured version whose last load failed; 0 if none could be listed."""
        configured = [record for record in self._services.values() if record.spec is not None]
        failed = [
            [each.name, each.version] for record in configured for each in record.versions.values() if each.failure
        ]
        return sorted([*failed, *([record.name, 0] for record in configured if record.problem)])

    def is_configured(self, name: str) -> bool:
        """Return True if a name is configured now."""
        service = self._services.get(name)
        return service is not None and service.spec is not None

    def is_removed(self, name: str) -> bool:
        """Return True if a name was configured, is not any more, and all its versions have ended."""
        service = self._services.get(name)
        if service is None or service.spec is not None:
            return False
        return all(record.state is VersionState.END for record in service.versions.values())

    def why_not(self, name: str) -> str:
        """Return why a configured name is unavailable; meaningless for an available one."""
        return unavailable_reason(self._record_of(name))

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Return the state of every version ever seen, by name."""
        return {name: service.statuses() for name, service in self._services.items()}

    def current_states(self) -> list[VersionStatus]:
        """Return the state of each version that is not retired; may be called from any thread.

        A service whose versions could not be listed has a failed version 0.
        """
        states = []
        for service in tuple(self._services.values()):
            versions = [record.status for record in tuple(service.versions.values())]
            states += [status for status in versions if status.state is not VersionState.END]
            if service.problem and service.spec is not None:
                states.append(service.listing_failure)
        return states

    @property
    def readiness(self) -> Readiness:
        """Readiness of the expected services, with the reason if one is missing."""
        services = self._services.values()
        if self._stopped:
            return Readiness(ready=False, reason="the server is shutting down")
        if self._ready_requires == "none":
            return Readiness(ready=True)
        loading = None if self._loaded.is_set() else startup_readiness(services, self.kinds)
        return loading or current_readiness(services, when_empty=self._ready_when_empty)

    def expected_services(self) -> list[str] | None:
        """Return the services that readiness expects now, or None during the first configuration pass."""
        known = self._services.values() if self._loaded.is_set() else None
        return None if known is None else [record.name for record in known if record.is_expected]

    def expect(self, names: Iterable[str]) -> None:
        """Expect only these services of the first configuration: those that other processes of the server expect.

        Otherwise a restarted worker would take the server out of rotation for an entry that failed in all workers.
        """
        self._expected_by_peers = frozenset(names)

    def subscribe(self, callback: Callable[[VersionStatus], None]) -> None:
        """Call back at every change of a version's state; the callback must neither block nor raise."""
        self._on_status.append(callback)

    def subscribe_readiness(self, callback: Callable[[Readiness], None]) -> None:
        """Call back at every change of :attr:`readiness`; the callback must neither block nor raise."""
        self._on_readiness.append(callback)

    def on_poll(self, callback: Callable[[], Awaitable[object]]) -> None:
        """Run a coroutine at each poll, before directories are listed; its errors end the server."""
        self._poll_callbacks.append(callback)

    async def wait_change(self) -> None:
        """Return at the next change of a version's state or of the readiness."""
        await self._changed.wait()

    def _record_of(self, name: str) -> ServiceRecord:
        service = self._services.get(name)
        if service is None:
            raise ServiceMissing(f'nothing is served under the name "{cut(name, 80)}"')
        return service

    def _find(self, name: str, version: int) -> Instance:
        if self._stopped:
            raise NotReady("the server is shutting down")
        service = self._record_of(name)
        instance = service.find(version)
        if instance is None:
            raise service.refusal(version)
        return instance

    async def _lease_later(self, name: str, version: int) -> Lease:
        with trio.move_on_after(self.load_wait_seconds):
            while (service := self._services.get(name)) is not None and not self._stopped:
                if service.find(version) is not None or not service.is_pending(version):
                    break
                await service.changed.wait()
        return Lease(self._find(name, version))

    async def _apply(self, specs: Iterable[ServableSpec]) -> ApplyResult:
        by_name: dict[str, ServableSpec] = {}
        for spec in specs:
            by_name.setdefault(spec.name, spec)
        for name, record in self._services.items():
            if name not in by_name:
                record.unconfigure()
        for name, spec in by_name.items():
            kind = self.kinds[spec.kind]
            record = self._services.setdefault(name, ServiceRecord(name, kind, self._publish))
            if record.spec is None and not self._loaded.is_set():
                known = self._expected_by_peers
                record.is_expected = self._ready_requires == "all" if known is None else name in known
            record.configure(spec, kind)
        self.has_limits = any(spec.max_concurrency for spec in by_name.values())
        CORES.services = sum(self.kinds[spec.kind].fills_cores for spec in by_name.values())
        self.mirrors.follow(by_name.values())
        result = await self._reconcile_all(forced=True)
        self._loaded.set()
        self._announce_readiness()
        return result

    async def _reconcile_all(self, *, forced: bool) -> ApplyResult:
        """Bring everything in line: callees before callers, unconfigured services last."""
        await update_dependencies(self._services)
        configured = [record for record in self._services.values() if record.spec is not None]
        results = await self._reconcile(configured, forced=forced)
        left_out = [record for record in self._services.values() if record.spec is None]
        had_versions = {record.name: self._reconciler.retire_all(record) for record in retirement_order(left_out)}
        for record in left_out:
            record.settled = True
            record.touch()
        callers = [
            each for each in configured if any(had_versions.get(call.name) for call in each.calls if call.reloads)
        ]
        results += await self._reconcile(callers, forced=False)
        self._announce_readiness()
        return _merge_results([*results, ApplyResult(changed=any(had_versions.values()))])

    async def _reconcile(self, records: Collection[ServiceRecord], *, forced: bool) -> list[ApplyResult]:
        results: list[ApplyResult] = []

        async def reconcile(record: ServiceRecord) -> None:
            results.append(await self._reconciler.reconcile(record, forced=forced))
            # Afterwards a change of other services is announced once for all.
            if not (self._loaded.is_set() and record.is_expected):
                self._announce_readiness()

        await run_in_load_order(records, reconcile)
        return results

    async def _watch(self) -> None:
        await self.wait_loaded()
        await PeriodicCheck(self._poll, self._poll_seconds).run(pauses_first=True)

    async def _poll(self) -> bool:
        for callback in self._poll_callbacks:
            await callback()
        await self._jobs.put(partial(self._reconcile_all, forced=False)).wait()
        # Failed loads have their own retry times.
        return True

    def _retire(self, instance: Instance, closed: Callable[[], None] | None) -> None:
        self._retired.add(instance, closed)
        if self._nursery is not None and not self._stopped:
            self._nursery.start_soon(self._retired.close_when_idle, instance)

    async def _shut_down(self) -> None:
        self._stopped = True
        for record in retirement_order(self._services.values()):
            self._reconciler.retire_all(record)
            record.touch()
        self._announce_readiness()
        await self._retired.close_all(self._shutdown_seconds)

    def _publish(self, status: VersionStatus) -> None:
        for callback in self._on_status:
            callback(status)
        self._announce()

    def _announce_readiness(self) -> None:
        for record in self._services.values():
            if not record.is_expected and record.spec is not None:
                record.is_expected = not _unready_reasons(record)
        if self.readiness == self._announced:
            return
        self._announced = self.readiness
        for callback in self._on_readiness:
            callback(self._announced)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def parse_version(version: str) -> int:
    """Parse a version number; 0 and an empty string mean the default version.

    Raises:
        InvalidRequest: it is not a number.
    """
    if not version:
        return DEFAULT_VERSION
    number = int(version) if _INTEGER.fullmatch(version) else None
    if number is None or abs(number) > _MAX_VERSION:
        raise InvalidRequest(f'Model version must be an integer, got "{cut(version, 40)}"')
    return number


async def _run_services(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    # A caller cancelled before the start gets no nursery, and could not end the shielded block.
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()


def _merge_results(results: Iterable[ApplyResult]) -> ApplyResult:
    results = tuple(results)
    failures = {(status.name, status.version): status for result in results for status in result.failures}
    return ApplyResult(any(result.changed for result in results), tuple(failures[key] for key in sorted(failures)))
