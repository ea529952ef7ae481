"""Loading of services: order of dependencies, change detection, loads of versions, and reconciliation.

::

    Kind.depends_on ─> calls of each record ─┬─> circular and missing dependencies: problems of the record
                                             └─> in_order: one task per record, which waits for its callees
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

import structlog
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import ConfigError, NotReady, Problem, ServerError, StorageFailure
from ovmstrio.core.resource_registry import owned_by
from ovmstrio.serving.instances import Instance
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.model_versions import choose_versions
from ovmstrio.serving.records import DEFAULT_VERSION, ApplyResult, Failure, VersionState
from ovmstrio.telemetry.process_metrics import MemoryGrowthMeter
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from ovmstrio.core.service import Detection, GrpcDeclaration, GrpcServices, Servable, Service
    from ovmstrio.serving.kind import Dependency, Kind, LoadContext
    from ovmstrio.serving.model_versions import Listing
    from ovmstrio.serving.records import ServiceRecord, VersionRecord

# ----------------------------------------------------------------------
# Dependencies
# ----------------------------------------------------------------------


class ChangeDetector:
    """Fingerprints files and the loads of callees."""

    def __init__(self, services: Mapping[str, ServiceRecord]) -> None:
        self.services = services

    async def list(self, record: ServiceRecord, spec: ServableSpec) -> Listing:
        """List the versions of a service; raises as ``Kind.list_versions``, also for files that cannot be examined."""
        try:
            listing = await trio.to_thread.run_sync(record.kind.list_versions, spec)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(f"the files cannot be examined: {error}")]) from error
        return replace(listing, fingerprint=listing.fingerprint + self._callee_loads(record))

    async def of(self, record: ServiceRecord, spec: ServableSpec, directory: Path) -> str:
        """Return the fingerprint that a version would have if it were loaded now."""
        called = self._callee_loads(record)
        try:
            return await trio.to_thread.run_sync(record.kind.fingerprint, spec, directory) + called
        except (OSError, ValueError):  # the load reports files that cannot be examined
            return called

    def _callee_loads(self, record: ServiceRecord) -> str:
        return "".join(f"\n{call.name}:{call.version}:{self._load_id(call)}" for call in record.calls if call.reloads)

    def _load_id(self, call: Dependency) -> str:
        service = self.services.get(call.name)
        return "" if service is None else service.loaded(int(call.version or DEFAULT_VERSION))


def find_cycles(specs: Iterable[ServableSpec], calls: Mapping[str, Sequence[str]]) -> dict[str, Problem]:
    """Return a problem for each service in a dependency cycle, by service name.

    Loading cannot detect this: during a configuration change, each service still finds the old ones.
    """
    found = {}
    for spec in specs:
        path = _shortest_cycle(spec.name, calls)
        if path:
            code = f"{spec.kind.replace(' ', '_').upper()}_CALLS_ITSELF"
            message = f"{code}: it calls itself through others: {' -> '.join(path)}"
            found[spec.name] = spec.placed(Problem(message, suggestion="have one of them call a model instead"))
    return found


def callers_before_callees(calls: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names ordered so that callers come before callees, except within circles."""
    acyclic = {
        name: () if _shortest_cycle(name, calls) else [each for each in called if each in calls]
        for name, called in calls.items()
    }
    return list(reversed(tuple(TopologicalSorter(acyclic).static_order())))


def _shortest_cycle(start: str, calls: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Return the shortest path from a service to itself; empty if there is none."""
    paths: deque[tuple[str, ...]] = deque([(start,)])
    seen = {start}
    while paths:
        path = paths.popleft()
        for callee in calls.get(path[-1], ()):
            if callee == start:
                return (*path, start)
            if callee not in seen:
                seen.add(callee)
                paths.append((*path, callee))
    return ()


log = structlog.get_logger(__name__)


async def update_dependencies(services: Mapping[str, ServiceRecord]) -> None:
    """Update the dependencies, circular dependencies and missing callees of all configured services."""
    configured = [(record, spec) for record in services.values() if (spec := record.spec) is not None]
    if not configured:
        return
    found = await trio.to_thread.run_sync(lambda: [_dependencies(*each) for each in configured])
    for (record, _), calls in zip(configured, found, strict=True):
        record.calls = calls
    names = {record.name: [call.name for call in record.calls] for record, _ in configured}
    circles = find_cycles([spec for _, spec in configured], names)
    for record, _ in configured:
        record.circle = circles.get(record.name)
        unmet = tuple(
            _unmet(call, call.place, names)
            for call in record.calls
            if call.place is not None and call.name not in names
        )
        for problem in unmet if unmet != record.unmet else ():
            log.warning("dependency missing", kind=record.kind.name, name=record.name, problem=str(problem))
        record.unmet = unmet


def _dependencies(record: ServiceRecord, spec: ServableSpec) -> tuple[Dependency, ...]:
    try:
        return tuple(record.kind.depends_on(spec))
    except (OSError, ValueError):  # the listing reports files that cannot be examined
        return record.calls


def _unmet(call: Dependency, place: Problem, configured: Collection[str]) -> Problem:
    return Problem(
        f"{place.message}, and nothing of that name is configured",
        place.file,
        place.line,
        place.path,
        suggestion=did_you_mean(call.name, configured),
        severity="warning",
    )


async def run_in_load_order(
    records: Collection[ServiceRecord], work: Callable[[ServiceRecord], Awaitable[None]]
) -> None:
    """Run ``work`` on each record after its callees, otherwise concurrently; circular dependencies are ignored."""
    done = {record.name: trio.Event() for record in records}

    async def follow(record: ServiceRecord) -> None:
        for call in record.calls if record.circle is None else ():
            if call.name in done:
                await done[call.name].wait()
        await work(record)
        done[record.name].set()

    async with trio.open_nursery() as nursery:
        for record in records:
            nursery.start_soon(follow, record)


def retirement_order(records: Collection[ServiceRecord]) -> list[ServiceRecord]:
    """Return records in retirement order: callers before callees."""
    by_name = {record.name: record for record in records}
    calls = {record.name: [call.name for call in record.calls] for record in records}
    return [by_name[name] for name in callers_before_callees(calls)]


# ----------------------------------------------------------------------
# Loads and reconciliation: each service follows its configuration and files; new versions load before old ones retire
# ----------------------------------------------------------------------


def check_grpc_names(name: str, kind: Kind[Any], service: Service, records: Iterable[ServiceRecord]) -> None:
    """Check that the gRPC service names of a loaded entry are unique in the server.

    Raises:
        ConfigError: a gRPC service name is taken.
    """
    declared = grpc_declaration(kind, service)
    if declared is None:
        return
    from ovmstrio.encoding.messages import OWN_SERVICES  # noqa: PLC0415 - needed by few services

    owners = dict.fromkeys(OWN_SERVICES, "the server itself")
    for record in records:
        found = record.serving.get("") if record.name != name and record.spec is not None else None
        other = None if found is None else grpc_declaration(record.kind, found.servable)
        if other is not None:
            owners |= dict.fromkeys(other.names, other.source)
    problems = [
        Problem(
            f"the service {each} is already served by {owners[each]}",
            file=declared.source,
            suggestion="give it another name or package",
        )
        for each in declared.names
        if each in owners
    ]
    if problems:
        raise ConfigError(problems)


def grpc_declaration(kind: Kind[Any], service: Service) -> GrpcDeclaration | None:
    """Return the gRPC services that a service provides; None without any."""
    return cast("GrpcServices", service).declaration if CallType.GRPC in kind.call_types else None


def describe_error(error: Exception) -> str:
    """Return the reason of a failed load as one text."""
    return error.message if isinstance(error, ServerError) else f"{type(error).__name__}: {text_of(error)}"


def load_problems(
    kind: Kind[Any], spec: ServableSpec, error: Exception, directory: Path | None = None
) -> tuple[Problem, ...]:
    """Return the problems of a failed load or listing, with their places in the configuration."""
    problems = error.problems if isinstance(error, ConfigError) else (Problem(describe_error(error)),)
    return tuple(kind.place(spec, problem, directory) for problem in problems)


class VersionLoader:
    """Loads versions, a bounded number at once; an exception of a load becomes the failure of that version.

    Args:
        context: returns the load context; None while the server is not running.
        change_detector: fingerprints versions.
        concurrent_loads: number of concurrent loads.
    """

    def __init__(
        self, context: Callable[[], LoadContext | None], change_detector: ChangeDetector, concurrent_loads: int
    ) -> None:
        self._context = context
        self._change_detector = change_detector
        self._limiter = trio.CapacityLimiter(concurrent_loads)
        self._memory_growth = MemoryGrowthMeter()

    async def load(self, service: ServiceRecord, spec: ServableSpec, version: int, directory: Path) -> Instance | None:
        """Load a version and let it serve; return the replaced instance, which must be retired.

        Load errors become the version's state.  Cancellation keeps what was served before.
        """
        record = service.begin_load(version)
        async with self._limiter:
            files = ""
            reported: list[Problem] = []
            detections: list[Detection] = []
            log.info("service loading", kind=spec.kind, name=service.name, version=version, path=str(directory))
            started = perf_counter()
            try:
                files = await self._change_detector.of(service, spec, directory)
                if spec.errors and not self._can_report_all_problems(service):
                    raise ConfigError(spec.errors)  # noqa: TRY301 - a failure of the version like any other
                # Callers check `call_types` before they use the service as a servable.
                receive = {"warn": reported.append, "detect": detections.append}
                servable = cast("Servable", await self._load(service, spec, version, directory, receive))
                await self._check_grpc_names(service, servable)
            except Exception as error:  # noqa: BLE001 - user code and OpenVINO may raise anything
                problems = load_problems(service.kind, spec, error, directory)
                failure = _next_failure(record, spec, error, files, problems)
                if failure.is_new:
                    _log_failure(record, spec, error, problems)
                service.fail_load(record, describe_error(error), failure, perf_counter() - started)
                return None
            seconds = perf_counter() - started
            log.info(
                "service available", kind=spec.kind, name=service.name, version=version, load_seconds=round(seconds, 3)
            )
            if detections:
                shown = {each.setting: f"{each.value} ({each.source})" for each in detections}
                log.info("settings detected", name=service.name, **shown)
            calls, call_types = frozenset(call.name for call in service.calls), service.kind.call_types
            warnings = tuple(service.kind.place(spec, each, directory) for each in reported)
            instance = Instance(spec, str(version), servable, files, calls, call_types, warnings, tuple(detections))
            return service.finish_load(record, instance, seconds)

    def _can_report_all_problems(self, service: ServiceRecord) -> bool:
        """Return True if a configuration check should load an invalid service to find its further problems."""
        context = self._context()
        return service.kind.reports_all_problems and service.circle is None and context is not None and context.is_trial

    async def _load(
        self, service: ServiceRecord, spec: ServableSpec, version: int, directory: Path, receive: dict[str, Any]
    ) -> Service:
        context = self._context()
        if context is None:
            raise NotReady("the server is not running")
        load_context = replace(context, **receive, names=tuple(self._change_detector.services))
        with owned_by(service.name), self._memory_growth.watching() as grown:
            loaded = await service.kind.load(spec, version, directory, load_context)
            size = grown()
        record = service.record(version)
        if record is not None:
            record.grown_bytes = size
        if size is not None:
            context.meters.set_memory(service.name, str(version), "resident", size)
        return loaded

    async def _check_grpc_names(self, record: ServiceRecord, servable: Service) -> None:
        try:
            check_grpc_names(record.name, record.kind, servable, self._change_detector.services.values())
        except BaseException:
            with trio.CancelScope(shield=True):
                await servable.aclose()
            raise


_UNCHANGED_RETRY_SECONDS: Final = 60.0
"""Retry interval for files that cannot be served and have not changed: only permissions may have."""


def _next_failure(
    record: VersionRecord, spec: ServableSpec, error: Exception, files: str, problems: tuple[Problem, ...]
) -> Failure:
    before = record.failure
    backoff = Backoff() if before is None else before.backoff
    is_certain = isinstance(error, ConfigError) and not record.kind.runs_user_code
    is_same = is_certain and before is not None and (before.files, before.problems) == (files, problems)
    pause = _UNCHANGED_RETRY_SECONDS if is_same else backoff.seconds_after()
    return Failure(spec, files, backoff, trio.current_time() + pause, problems, is_new=not is_same)


def _log_failure(record: VersionRecord, spec: ServableSpec, error: Exception, problems: tuple[Problem, ...]) -> None:
    log.error(
        "load failed",
        kind=spec.kind,
        name=record.name,
        version=record.version,
        problems=[str(problem) for problem in problems],
        old_serves=record.instance is not None,
        exc_info=None if isinstance(error, ServerError) else error,
    )


class Reconciler:
    """Loads and retires the versions of one service at a time.

    Args:
        loader: loads a version.
        change_detector: lists and fingerprints versions.
        retire: schedules the closing of an idle instance, without waiting.
        unready_reason: returns why a service's files are unavailable, and whether the download failed.
    """

    def __init__(
        self,
        loader: VersionLoader,
        change_detector: ChangeDetector,
        retire: Callable[[Instance, Callable[[], None] | None], None],
        unready_reason: Callable[[ServableSpec], tuple[str, bool] | None] = lambda _: None,
    ) -> None:
        self._loader = loader
        self._change_detector = change_detector
        self._retire = retire
        self._unready_reason = unready_reason

    async def reconcile(self, service: ServiceRecord, *, forced: bool) -> ApplyResult:
        """Load missing versions and retire unwanted ones; ``forced`` retries failed versions at once.

        Failures are in the result and in the service's states, never raised.
        """
        spec = service.wanted
        unready_reason = None if spec is None else self._unready_reason(spec)
        if spec is not None and unready_reason is not None:
            return self._defer(service, spec, *unready_reason)
        try:
            if spec is None:
                return ApplyResult(changed=self.retire_all(service))
            listing = await self._list(service, spec)
            if listing is None:
                return ApplyResult(failures=(service.listing_failure,))
            return await self._load_and_retire(service, spec, listing, forced=forced)
        finally:
            service.settled = True
            service.touch()

    def retire_all(self, service: ServiceRecord) -> bool:
        """Stop leases of all versions; return True if there were any."""
        return self._retire_except(service, ())

    def _defer(self, service: ServiceRecord, spec: ServableSpec, reason: str, has_failed: bool) -> ApplyResult:
        """Leave a service as it is until its files are downloaded."""
        known, service.problem = service.problem, reason
        service.settled = has_failed
        service.problems = load_problems(service.kind, spec, StorageFailure(reason)) if has_failed else ()
        if has_failed and known != reason:
            log.error("model not served", model=service.name, reason=reason)
        service.touch()
        return ApplyResult(failures=(service.listing_failure,) if has_failed else ())

    async def _list(self, service: ServiceRecord, spec: ServableSpec) -> Listing | None:
        known, unexpected = service.problem, None
        try:
            served = [record.instance.spec for record in service.versions.values() if record.instance is not None]
            service.kind.check_change(spec, served)
            listing = await self._change_detector.list(service, spec)
        except Exception as error:  # noqa: BLE001 - of one kind or its files; other services continue
            service.problem, service.problems = describe_error(error), load_problems(service.kind, spec, error)
            unexpected = None if isinstance(error, ServerError) else error
        else:
            for warning in listing.warnings if listing.warnings != service.warnings else ():
                log.warning(
                    "repository entry ignored", model=service.name, base_path=str(spec.base_path), problem=warning
                )
            service.problem, service.problems, service.warnings = "", (), listing.warnings
            return listing
        if service.problem != known:
            log.error("model not served", model=service.name, reason=service.problem, exc_info=unexpected)
        return None

    async def _load_and_retire(
        self, service: ServiceRecord, spec: ServableSpec, listing: Listing, *, forced: bool
    ) -> ApplyResult:
        given_up = await self._versions_not_due(service, spec, listing, forced=forced)
        attempted: set[int] = set()
        while True:
            failed = given_up.difference(service.available_versions())
            chosen, wanted = choose_versions(spec.version_policy, listing.versions, failed)
            # A version loaded in this pass counts as served, even if its files have changed since.
            settled = given_up | attempted
            missing = [v for v in chosen if not (v in settled or _is_served(service, spec, v, listing.fingerprint))]
            if not missing:
                break
            attempted.update(missing)
            await self._load_all(service, spec, {version: listing.versions[version] for version in missing})
            given_up.update(version for version in missing if service.versions[version].failure is not None)
        retired = self._retire_except(service, wanted)
        failures = tuple(service.versions[version].status for version in sorted(attempted & given_up))
        return ApplyResult(retired or bool(attempted - given_up), failures)

    async def _versions_not_due(
        self, service: ServiceRecord, spec: ServableSpec, listing: Listing, *, forced: bool
    ) -> set[int]:
        """Return the versions whose last load failed and whose retry is not due."""
        failed = {} if forced else {version: record for version, record in service.versions.items() if record.failure}
        return {
            version
            for version, record in failed.items()
            if version in listing.versions and not await self._is_due(service, record, spec, listing.versions[version])
        }

    async def _is_due(self, service: ServiceRecord, record: VersionRecord, spec: ServableSpec, directory: Path) -> bool:
        failure = record.failure
        if failure is None or trio.current_time() >= failure.retry_at or failure.spec.needs_reload(spec):
            return True
        if failure.spec.errors != spec.errors:
            return True
        return await self._change_detector.of(service, spec, directory) != failure.files

    async def _load_all(self, service: ServiceRecord, spec: ServableSpec, directories: dict[int, Path]) -> None:
        async with trio.open_nursery() as nursery:
            for version, directory in directories.items():
                nursery.start_soon(self._load, service, spec, version, directory)

    async def _load(self, service: ServiceRecord, spec: ServableSpec, version: int, directory: Path) -> None:
        replaced = await self._loader.load(service, spec, version, directory)
        if replaced is not None:
            self._retire(replaced, None)

    def _retire_except(self, service: ServiceRecord, wanted: Collection[int]) -> bool:
        unwanted = [
            record
            for version, record in service.versions.items()
            if version not in wanted and record.state < VersionState.UNLOADING
        ]
        for record in unwanted:
            instance = service.begin_retirement(record)
            if instance is not None:
                self._retire(instance, _retirement_callback(service, record))
        return bool(unwanted)


def _retirement_callback(service: ServiceRecord, record: VersionRecord) -> Callable[[], None]:
    return lambda: service.finish_retirement(record)


def _is_served(service: ServiceRecord, spec: ServableSpec, version: int, fingerprint: str) -> bool:
    """Return True if a version is served with these settings and files, and update the instance's spec."""
    record = service.versions.get(version)
    if record is None or record.instance is None or spec.errors:
        return False
    if record.instance.spec is not spec and record.instance.spec.needs_reload(spec):
        return False
    if fingerprint and record.instance.files != fingerprint:
        return False
    record.instance.spec = spec
    if record.failure is not None:
        service.clear_failure(record)
    return True
