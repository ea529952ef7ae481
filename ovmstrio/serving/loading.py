"""Bringing one servable in line with its configuration and its files: load first, retire after.

::

    list versions ─> policy chooses ─> load what is missing ─┐ a version failed: choose again without it
                          ^──────────────────────────────────┘
                     all chosen ones serve ─> retire what is not wanted
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import structlog
import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem, ServerError
from ovmstrio.core.resource_registry import owned_by
from ovmstrio.serving.instances import Instance
from ovmstrio.serving.kind import Takes
from ovmstrio.serving.model_versions import choose_versions
from ovmstrio.serving.records import ApplyResult, Failure, VersionState, VersionStatus, error_code_of
from ovmstrio.telemetry.process_metrics import GrowthWatch
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.service import GrpcDeclaration, GrpcServices, Servable, Service
    from ovmstrio.serving.kind import Kind, LoadContext
    from ovmstrio.serving.load_order import Marks
    from ovmstrio.serving.model_versions import Listing
    from ovmstrio.serving.records import ServiceRecord, VersionRecord

__all__ = ["Reconciler", "VersionLoader", "declaration_of", "describe", "problems_of"]

# ----------------------------------------------------------------------
# Loading one version: bounded, timed, and with every failure turned into a state that says why
# ----------------------------------------------------------------------


def check_grpc_names(name: str, kind: Kind[Any], service: Service, records: Iterable[ServiceRecord]) -> None:
    """See to it that nothing else has the gRPC services of what is loaded for an entry; what is about to go does not.

    Raises:
        ConfigError: another entry or the server has one of them.
    """
    brought = declaration_of(kind, service)
    if brought is None:
        return
    from ovmstrio.encoding.messages import OWN_SERVICES  # noqa: PLC0415 - for the few that bring services

    owners = dict.fromkeys(OWN_SERVICES, "the server itself")
    for record in records:
        found = record.serving.get("") if record.name != name and record.spec is not None else None
        other = None if found is None else declaration_of(record.kind, found.servable)
        if other is not None:
            owners |= dict.fromkeys(other.names, other.source)
    problems = [
        Problem(
            f"the service {each} is already served by {owners[each]}",
            file=brought.source,
            suggestion="give it another name or package",
        )
        for each in brought.names
        if each in owners
    ]
    if problems:
        raise ConfigError(problems)


def declaration_of(kind: Kind[Any], service: Service) -> GrpcDeclaration | None:
    """Give the gRPC services that a service brings, None for none."""
    return cast("GrpcServices", service).declaration if Takes.GRPC in kind.takes else None


log = structlog.get_logger(__name__)


def describe(error: Exception) -> str:
    """Say in one text why a load failed."""
    return error.message if isinstance(error, ServerError) else f"{type(error).__name__}: {text_of(error)}"


def problems_of(
    kind: Kind[Any], spec: ServableSpec, error: Exception, directory: Path | None = None
) -> tuple[Problem, ...]:
    """List why a version could not be loaded, or versions not be listed, with the places where that can be mended."""
    problems = error.problems if isinstance(error, ConfigError) else (Problem(describe(error)),)
    return tuple(kind.place(spec, problem, directory) for problem in problems)


class VersionLoader:
    """Loads versions, a bounded number at a time; whatever a load raises is a failure of that version alone.

    Args:
        context: gives what the server lends to those that load, None while it does not run.
        marks: tell what a version is made of.
        concurrent_loads: how many loads may run at once.
    """

    def __init__(self, context: Callable[[], LoadContext | None], marks: Marks, concurrent_loads: int) -> None:
        self._context = context
        self._marks = marks
        self._limiter = trio.CapacityLimiter(concurrent_loads)
        self._growth = GrowthWatch()

    async def load(self, service: ServiceRecord, spec: ServableSpec, version: int, directory: Path) -> Instance | None:
        """Load a version and let it serve; the instance that it replaces is returned, to be retired.

        Raises: nothing that the loader raises; that becomes the version's state.

        Cancellation: at any checkpoint; the loader gives back what it had opened, and what was served goes on.
        """
        record = service.load_begins(version)
        async with self._limiter:
            files = await self._marks.of(service, spec, directory)
            remarks: list[Problem] = []
            log.info("loading", kind=spec.kind, name=service.name, version=version, path=str(directory))
            started = perf_counter()
            try:
                if spec.errors and not self._tells_all(service):
                    raise ConfigError(spec.errors)  # noqa: TRY301 - a failure of the version like any other
                # What a service takes is known to those who call it.
                servable = cast("Servable", await self._load(service, spec, version, directory, remarks))
                await self._check_grpc_names(service, servable)
            except Exception as error:  # noqa: BLE001 - the servable border
                problems = problems_of(service.kind, spec, error, directory)
                _log_failure(record, spec, error, problems)
                failure = _next_failure(record, spec, files, problems)
                service.load_fails(record, describe(error), failure, perf_counter() - started)
                return None
            seconds = perf_counter() - started
            log.info("available", kind=spec.kind, name=service.name, version=version, load_seconds=round(seconds, 3))
            calls, takes = frozenset(call.name for call in service.calls), service.kind.takes
            odd = tuple(service.kind.place(spec, remark, directory) for remark in remarks)
            instance = Instance(spec, str(version), servable, files, calls, takes, odd)
            return service.load_succeeds(record, instance, seconds)

    def _tells_all(self, service: ServiceRecord) -> bool:
        """Tell whether loading what cannot be served would tell what else is wrong with it, which a check asks for."""
        context = self._context()
        return service.kind.tells_all and service.circle is None and context is not None and context.is_trial

    async def _load(
        self, service: ServiceRecord, spec: ServableSpec, version: int, directory: Path, remarks: list[Problem]
    ) -> Service:
        context = self._context()
        if context is None:
            raise NotReady("the server is not running")
        lent = replace(context, remark=remarks.append, names=tuple(self._marks.services))
        with owned_by(service.name), self._growth.watching() as grown:
            loaded = await service.kind.load(spec, version, directory, lent)
            size = grown()
        record = service.record(version)
        if record is not None:
            record.grown_bytes = size
        if size is not None:
            context.meters.set_memory(service.name, str(version), "resident", size)
        return loaded

    async def _check_grpc_names(self, record: ServiceRecord, servable: Service) -> None:
        """Close what brings a gRPC service that something else has; no checkpoint for what does not."""
        try:
            check_grpc_names(record.name, record.kind, servable, self._marks.services.values())
        except ConfigError:
            await servable.aclose()
            raise


def _next_failure(record: VersionRecord, spec: ServableSpec, files: str, problems: tuple[Problem, ...]) -> Failure:
    backoff = Backoff() if record.failure is None else record.failure.backoff
    return Failure(spec, files, backoff, trio.current_time() + backoff.seconds_after(), problems)


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


# ----------------------------------------------------------------------
# Bringing one servable in line with its configuration and its files: load first, retire after
# ----------------------------------------------------------------------


class Reconciler:
    """Loads and retires versions of one service at a time, as its configuration and its files ask for.

    Args:
        loader: loads a version.
        marks: tell what versions there are, and what they are made of.
        retire: sees to it that an instance is closed when it is idle; must not wait for that.
    """

    def __init__(
        self, loader: VersionLoader, marks: Marks, retire: Callable[[Instance, Callable[[], None] | None], None]
    ) -> None:
        self._loader = loader
        self._marks = marks
        self._retire = retire

    async def reconcile(self, service: ServiceRecord, *, forced: bool) -> ApplyResult:
        """Load what is missing and retire what is not wanted; ``forced`` tries again what has failed before.

        Raises: nothing for a service that cannot be listed or loaded; that is in the result and in its states.

        Cancellation: at any checkpoint; what was served goes on.
        """
        spec = service.wanted
        try:
            if spec is None:
                return ApplyResult(changed=self.retire_all(service))
            listing = await self._list(service, spec)
            if listing is None:
                code = error_code_of(service.kind)
                status = VersionStatus(
                    service.name, 0, VersionState.LOADING, code, service.problem, kind=service.kind.name
                )
                return ApplyResult(failures=(status,))
            return await self._follow(service, spec, listing, forced=forced)
        finally:
            service.settled = True
            service.touch()

    def retire_all(self, service: ServiceRecord) -> bool:
        """Stop giving leases for every version; tell whether there was any."""
        return self._retire_except(service, ())

    async def _list(self, service: ServiceRecord, spec: ServableSpec) -> Listing | None:
        known = service.problem
        try:
            served = [record.instance.spec for record in service.versions.values() if record.instance is not None]
            service.kind.check_change(spec, served)
            listing = await self._marks.list(service, spec)
        except ConfigError as error:
            service.problem, service.problems = error.message, problems_of(service.kind, spec, error)
        else:
            for warning in listing.warnings if listing.warnings != service.warnings else ():
                log.warning("model repository", model=service.name, base_path=str(spec.base_path), problem=warning)
            service.problem, service.problems, service.warnings = "", (), listing.warnings
            return listing
        if service.problem != known:
            log.error("model cannot be served", model=service.name, reason=service.problem)
        return None

    async def _follow(
        self, service: ServiceRecord, spec: ServableSpec, listing: Listing, *, forced: bool
    ) -> ApplyResult:
        given_up = await self._given_up(service, spec, listing, forced=forced)
        attempted: set[int] = set()
        while True:
            broken = given_up.difference(service.available_versions())
            chosen, wanted = choose_versions(spec.version_policy, listing.versions, broken)
            # What was loaded just now counts as served, though its files may have changed meanwhile.
            settled = given_up | attempted
            missing = [v for v in chosen if not (v in settled or _is_served(service, spec, v, listing.mark))]
            if not missing:
                break
            attempted.update(missing)
            await self._load_all(service, spec, {version: listing.versions[version] for version in missing})
            given_up.update(version for version in missing if service.versions[version].failure is not None)
        retired = self._retire_except(service, wanted)
        failures = tuple(service.versions[version].status for version in sorted(attempted & given_up))
        return ApplyResult(retired or bool(attempted - given_up), failures)

    async def _given_up(
        self, service: ServiceRecord, spec: ServableSpec, listing: Listing, *, forced: bool
    ) -> set[int]:
        """Find the versions whose last load failed and that are not worth trying again now."""
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
        return await self._marks.of(service, spec, directory) != failure.files

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
            instance = service.retirement_begins(record)
            if instance is not None:
                self._retire(instance, _ending(service, record))
        return bool(unwanted)


def _ending(service: ServiceRecord, record: VersionRecord) -> Callable[[], None]:
    return lambda: service.retirement_ends(record)


def _is_served(service: ServiceRecord, spec: ServableSpec, version: int, mark: str) -> bool:
    """Tell whether a version is served with these settings and files, and note that they are the ones it has now."""
    record = service.versions.get(version)
    if record is None or record.instance is None or spec.errors:
        return False
    if record.instance.spec is not spec and record.instance.spec.needs_reload(spec):
        return False
    if mark and record.instance.files != mark:
        return False
    record.instance.spec = spec
    if record.failure is not None:
        service.forget_failure(record)
    return True
