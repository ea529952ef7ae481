"""Loading one version: bounded, timed, and with every failure turned into a state that says why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ovmstrio.core.errors import ConfigError, ServerError
from ovmstrio.core.servable import Servable
from ovmstrio.registry.grpc_names import check_grpc_names
from ovmstrio.registry.leases import Instance
from ovmstrio.registry.records import Failure
from ovmstrio.work.backoff import Backoff

if TYPE_CHECKING:
    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.registry.marks import Marks
    from ovmstrio.registry.records import ModelRecord, VersionRecord

__all__ = ["LoadServable", "VersionLoader", "describe"]

log = structlog.get_logger(__name__)

LoadServable = Callable[[Any, int, Path], Awaitable[Servable]]
"""What makes a servable of a version's files, warmed and ready to be called.

Its first argument is one of the specs that the registry was told to serve, of whichever kinds those are."""


def describe(error: Exception) -> str:
    """Say in one text why a load failed."""
    return error.message if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"


class VersionLoader:
    """Loads versions, a bounded number at a time.

    Args:
        load: makes a servable; anything that it raises is a failure of that version alone.
        marks: tell what a version is made of.
        concurrent_loads: how many loads may run at once.
    """

    def __init__(self, load: LoadServable, marks: Marks, concurrent_loads: int) -> None:
        self._load = load
        self._marks = marks
        self._limiter = trio.CapacityLimiter(concurrent_loads)

    async def load(self, model: ModelRecord, spec: ServableSpec, version: int, directory: Path) -> Instance | None:
        """Load a version and let it serve; the instance that it replaces is returned, to be retired.

        Raises: nothing that the loader raises; that becomes the version's state.

        Cancellation: at any checkpoint; the loader gives back what it had opened, and what was served goes on.
        """
        record = model.load_begins(version)
        async with self._limiter:
            files = await self._marks.of(spec, directory)
            log.info("loading", kind=spec.kind, name=model.name, version=version, path=str(directory))
            started = perf_counter()
            try:
                if spec.errors:
                    raise ConfigError(spec.errors)  # noqa: TRY301 - a failure of the version like any other
                servable = await self._load(spec, version, directory)
                await self._check_grpc_names(spec.name, servable)
            except Exception as error:  # noqa: BLE001 - the servable border
                _log_failure(record, spec, error)
                failure = _next_failure(record, spec, files)
                model.load_fails(record, describe(error), failure, perf_counter() - started)
                return None
            seconds = perf_counter() - started
            log.info("available", kind=spec.kind, name=model.name, version=version, load_seconds=round(seconds, 3))
            return model.load_succeeds(record, Instance(spec, version, servable, files), seconds)

    async def _check_grpc_names(self, name: str, servable: Servable) -> None:
        """Close what brings a gRPC service that something else has; no checkpoint for what does not."""
        try:
            check_grpc_names(name, servable, self._marks.models.values())
        except ConfigError:
            await servable.aclose()
            raise


def _next_failure(record: VersionRecord, spec: ServableSpec, files: str) -> Failure:
    backoff = Backoff() if record.failure is None else record.failure.backoff
    return Failure(spec, files, backoff, trio.current_time() + backoff.seconds_after())


def _log_failure(record: VersionRecord, spec: ServableSpec, error: Exception) -> None:
    log.error(
        "load failed",
        kind=spec.kind,
        name=record.name,
        version=record.version,
        reason=describe(error),
        old_serves=record.instance is not None,
        exc_info=None if isinstance(error, ServerError) else error,
    )
