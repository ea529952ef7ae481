"""Where the registry's servables are configured: files that are read again when they have changed, or when told to.

::

    config.json, subconfigs ─> ConfigSource ─> Registry.apply
                                  ^ load (start), reload (POST /v1/config/reload), poll (watcher)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.config.specs import ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem, ServerError, VersionsFailure
from ovmstrio.serving.fingerprints import content_mark
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.serving.records import ApplyResult, VersionStatus
    from ovmstrio.serving.registry import Registry

__all__ = ["ConfigSource", "ParseConfig", "reload_versions"]

log = structlog.get_logger(__name__)

ParseConfig = Callable[[bytes, Path], ServerSpec]
"""Makes a validated configuration of a file's content; the path is for messages and for relative paths in it."""

ApplySpecs = Callable[[Sequence[ServableSpec]], Awaitable["ApplyResult"]]
"""Brings what is served in line with what is configured."""

_READ_ATTEMPTS: Final = 3
_READ_PAUSE_SECONDS: Final = 0.01
"""A file that does not parse may be half written: it is read again after a pause, as OVMS does."""


async def reload_versions(registry: Registry) -> bool:
    """Look for new and vanished versions of what is configured; True if anything changed.

    Raises:
        VersionsFailure: a version failed to load; everything else is served.

    Cancellation: at once; the registry goes on with it.
    """
    result = await registry.rescan()
    _check(registry, result, VersionsFailure)
    return result.changed


class ConfigSource:
    """Keeps a registry in line with a configuration file.

    Args:
        path: the file.
        registry: what is kept in line.
        parse: reads the file's content.
        apply: takes over what is configured; the registry itself unless given.
    """

    def __init__(self, path: Path, registry: Registry, parse: ParseConfig, apply: ApplySpecs | None = None) -> None:
        self._path = path
        self._registry = registry
        self._parse = parse
        self._apply_specs = apply or registry.apply
        self._lock = trio.Lock()
        self._mark = ""
        self._further: dict[Path, bytes | None] = {}
        self._failed = False
        self._missing = False
        self._applied: Sequence[ServableSpec] | None = None
        self._good: Sequence[ServableSpec] | None = None
        self._before: Sequence[ServableSpec] | None = None

    async def reload(self, *, force: bool = False) -> bool:
        """Apply the file if it has changed or failed before, else only look for versions; True if anything changed.

        Raises:
            ConfigError: the file cannot be opened.
            FailedPrecondition: its content cannot be used; everything stays as it was.
            ModelFailure: something in it failed to load; everything else is served.

        Cancellation: at any checkpoint; the registry goes on with a change that it has begun.
        """
        async with self._lock:
            self._before = self._good
            content = await self._content()
            if force or self._failed or await self._has_changed(content):
                await self._apply(content)
                return True
            return await reload_versions(self._registry)

    async def poll(self) -> None:
        """Apply the file if it has changed; what is wrong with it is logged, and everything stays as it was.

        Raises: nothing.

        Cancellation: as :meth:`reload`.
        """
        async with self._lock:
            try:
                content = await self._content()
                if await self._has_changed(content):
                    await self._apply(content)
                self._missing = False
            except ServerError as error:
                self._note(error)

    async def _apply(self, content: bytes) -> None:
        self._failed = True
        try:
            spec = await self._read_whole(content)
        except ConfigError as error:
            raise FailedPrecondition(error.message) from error
        self._further = spec.further_files
        self._applied = spec.services
        result = await self._apply_specs(spec.services)
        kinds = self._registry.kinds.values()
        counts = {f"{kind.name.replace(' ', '_')}s": len(spec.of(kind.spec)) for kind in kinds}
        log.info("config applied", path=str(self._path), **counts, failures=len(result.failures))
        _check(self._registry, result, ModelFailure)
        _check_problems(spec.problems)
        self._failed, self._good = False, spec.services

    async def is_stale(self) -> bool:
        """Tell whether the file has changed since it was read last, which may be missing now.

        Cancellation: at once.
        """
        async with self._lock:
            try:
                content = await self._content()
            except ConfigError:
                return not self._missing
            self._missing = False
            return await self._has_changed(content)

    def note(self, error: ServerError) -> None:
        """Log what is wrong with the file; that it is missing, once."""
        self._note(error)

    async def restore(self) -> None:
        """Serve what could be loaded before the last :meth:`reload`; the file is tried again when that is asked for.

        Raises:
            ModelFailure: something of that cannot be loaded any more.

        Cancellation: as :meth:`reload`.
        """
        async with self._lock:
            good = self._before
            if good is None or good is self._applied:
                return
            self._failed, self._applied, self._good = True, good, good
            _check(self._registry, await self._apply_specs(good), ModelFailure)

    def _note(self, error: ServerError) -> None:
        missing = isinstance(error, ConfigError)
        # A file that is missing is missing at every poll; one line says so.
        if not (missing and self._missing):
            log.error("config reload failed", path=str(self._path), reason=error.message)
        self._missing = missing

    async def _read_whole(self, content: bytes) -> ServerSpec:
        for _ in range(_READ_ATTEMPTS - 1):
            self._mark = content_mark(content)
            try:
                return self._parse(content, self._path)
            except ConfigError:
                await trio.sleep(_READ_PAUSE_SECONDS)
                content = await self._content()
        self._mark = content_mark(content)
        return self._parse(content, self._path)

    async def _has_changed(self, content: bytes) -> bool:
        if content_mark(content) != self._mark:
            return True
        for path, known in self._further.items():
            if await _read(path) != known:
                return True
        return False

    async def _content(self) -> bytes:
        try:
            return await trio.to_thread.run_sync(read_regular_bytes, self._path, abandon_on_cancel=True)
        except OSError as error:
            problem = Problem(f"the file cannot be read: {error.strerror or error}", str(self._path))
            raise ConfigError([problem]) from error


async def _read(path: Path) -> bytes | None:
    try:
        return await trio.to_thread.run_sync(read_regular_bytes, path, abandon_on_cancel=True)
    except (OSError, ValueError):
        return None


def _check(registry: Registry, result: ApplyResult, failure: type[ModelFailure]) -> None:
    if result.failures:
        first = result.failures[0]
        raise failure(f"{_name_of(registry, first)}: {first.reason}")


def _name_of(registry: Registry, status: VersionStatus) -> str:
    version = f" version {status.version}" if registry.kinds[status.kind].has_versions and status.version else ""
    return f'{status.kind} "{status.name}"{version}'


def _check_problems(problems: Iterable[Problem]) -> None:
    errors = []
    for problem in problems:
        log.warning("config problem", problem=str(problem), severity=problem.severity)
        if problem.severity == "error":
            errors.append(str(problem))
    if errors:
        raise ModelFailure(errors[0])
