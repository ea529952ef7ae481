"""Loading one version: bounded, timed, and with every failure turned into a state that says why."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import structlog
import trio

from ovmstrio.core.census import owned_by
from ovmstrio.core.errors import ConfigError, NotReady, Problem, ServerError
from ovmstrio.core.texts import text_of
from ovmstrio.observability.resident_memory import GrowthWatch
from ovmstrio.registry.instances import Instance
from ovmstrio.registry.records import Failure
from ovmstrio.runtimes.kind import Takes
from ovmstrio.work.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.servable import GrpcDeclaration, GrpcServices, Servable, Service
    from ovmstrio.registry.order import Marks
    from ovmstrio.registry.records import ServiceRecord, VersionRecord
    from ovmstrio.runtimes.kind import Kind, LoadContext

__all__ = ["VersionLoader", "declaration_of", "describe", "problems_of"]


def check_grpc_names(name: str, kind: Kind[Any], service: Service, records: Iterable[ServiceRecord]) -> None:
    """See to it that nothing else has the gRPC services of what is loaded for an entry; what is about to go does not.

    Raises:
        ConfigError: another entry or the server has one of them.
    """
    brought = declaration_of(kind, service)
    if brought is None:
        return
    from ovmstrio.protocol.descriptors import OWN_SERVICES  # noqa: PLC0415 - for the few that bring services

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
