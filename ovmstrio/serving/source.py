"""Configuration source: applies a configuration file to the registry, at start, on reload and on change.

::

    config.json, subconfigs ─> ConfigSource ─> Registry.apply
                                  ^ load (start), reload (POST /v1/config/reload), poll (watcher)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.config.specs import ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem, ServerError, VersionsFailure
from ovmstrio.serving.fingerprints import content_fingerprint
from ovmstrio.util.regular_files import is_shortage, read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.serving.records import ApplyResult, VersionStatus
    from ovmstrio.serving.registry import Registry

log = structlog.get_logger(__name__)

ParseConfig = Callable[[bytes, Path], ServerSpec]
"""Parses and validates a configuration; the path is for messages and relative paths."""

ReadConfig = Callable[[Path], bytes]
"""Reads the content of a configuration; raises OSError or ConfigError. Blocks."""

ApplySpecs = Callable[[Sequence[ServableSpec]], Awaitable["ApplyResult"]]
"""Applies a configuration to the registry."""

_READ_ATTEMPTS: Final = 3
_READ_PAUSE_SECONDS: Final = 0.01
"""A file that does not parse may be half written: it is read again after this pause, as OVMS does."""


async def reload_versions(registry: Registry) -> bool:
    """Rescan the version directories of configured services; return True if anything changed.

    Raises:
        VersionsFailure: a version failed to load; everything else is served.
    """
    result = await registry.rescan()
    _check(registry, result, VersionsFailure)
    return result.changed


class ConfigSource:
    """Keeps a registry in line with a configuration file.

    Attributes:
        reloads: number of loads of the file by result, the first load included.
        last_success: time of the last successful load, since the epoch; 0 before the first one.

    Args:
        path: the file.
        parse: parses the file's content.
        apply: applies a configuration; by default ``registry.apply``.
        read: reads the file, or makes the content of a folder.
    """

    def __init__(
        self,
        path: Path,
        registry: Registry,
        parse: ParseConfig,
        apply: ApplySpecs | None = None,
        read: ReadConfig = read_regular_bytes,
    ) -> None:
        self._path = path
        self._read = read
        self._registry = registry
        self._parse = parse
        self._apply_specs = apply or registry.apply
        self._lock = trio.Lock()
        self._mark = ""
        self._further_files: dict[Path, bytes | None] = {}
        self._has_failed = False
        self._is_missing = False
        self._applied_specs: Sequence[ServableSpec] | None = None
        self._last_good: Sequence[ServableSpec] | None = None
        self._previous: Sequence[ServableSpec] | None = None
        self.reloads = {"success": 0, "failure": 0}
        self.last_success = 0.0

    async def reload(self, *, force: bool = False) -> bool:
        """Apply the file if it has changed or failed before, else rescan versions; return True if anything changed.

        Raises:
            ConfigError: the file cannot be opened.
            FailedPrecondition: the content is invalid; everything stays unchanged.
            ModelFailure: a service failed to load; everything else is served.
        """
        async with self._lock:
            self._previous = self._last_good
            try:
                content = await self._content()
                is_new = force or self._has_failed or await self._has_changed(content)
            except ConfigError:
                self.reloads["failure"] += 1
                raise
            if is_new:
                await self._apply(content)
                return True
            return await reload_versions(self._registry)

    async def poll(self) -> None:
        """Apply the file if it has changed; errors are logged, never raised."""
        async with self._lock:
            try:
                content = await self._content()
                if await self._has_changed(content):
                    await self._apply(content)
                self._is_missing = False
            except ServerError as error:
                self.note(error)
            except Exception:
                log.exception("config reload failed", path=str(self._path))

    async def _apply(self, content: bytes) -> None:
        try:
            await self._apply_content(content)
        except Exception:
            self.reloads["failure"] += 1
            raise
        self.reloads["success"] += 1
        self.last_success = time()

    async def _apply_content(self, content: bytes) -> None:
        self._has_failed = True
        try:
            spec = await self._parse_with_retry(content)
        except ConfigError as error:
            raise FailedPrecondition(error.message) from error
        self._further_files = spec.dependencies
        self._applied_specs = spec.services
        result = await self._apply_specs(spec.services)
        kinds = self._registry.kinds.values()
        counts = {f"{kind.name.replace(' ', '_')}s": len(spec.of(kind.spec)) for kind in kinds}
        log.info("config applied", path=str(self._path), **counts, failures=len(result.failures))
        _check(self._registry, result, ModelFailure)
        _check_problems(spec.problems)
        self._has_failed, self._last_good = False, spec.services

    async def is_stale(self) -> bool:
        """Return True if the file has changed since it was last read, or has disappeared."""
        async with self._lock:
            try:
                has_changed = await self._has_changed(await self._content())
            except ConfigError:
                return not self._is_missing
            self._is_missing = False
            return has_changed

    def note(self, error: ServerError) -> None:
        """Log an error of the file; a missing file is logged once."""
        missing = isinstance(error, ConfigError)
        if not (missing and self._is_missing):
            self.reloads["failure"] += missing
            log.error("config reload failed", path=str(self._path), reason=error.message)
        self._is_missing = missing

    async def restore(self) -> None:
        """Restore the configuration before the last :meth:`reload`; the next reload retries the file.

        Raises:
            ModelFailure: a service of the old configuration cannot be loaded any more.
        """
        async with self._lock:
            good = self._previous
            if good is None or good is self._applied_specs:
                return
            self._has_failed, self._applied_specs, self._last_good = True, good, good
            _check(self._registry, await self._apply_specs(good), ModelFailure)

    async def _parse_with_retry(self, content: bytes) -> ServerSpec:
        for _ in range(_READ_ATTEMPTS - 1):
            self._mark = content_fingerprint(content)
            try:
                return self._parse(content, self._path)
            except ConfigError:
                await trio.sleep(_READ_PAUSE_SECONDS)
                content = await self._content()
        self._mark = content_fingerprint(content)
        return self._parse(content, self._path)

    async def _has_changed(self, content: bytes) -> bool:
        if content_fingerprint(content) != self._mark:
            return True
        for path, known in self._further_files.items():
            if await _read(path) != known:
                return True
        return False

    async def _content(self) -> bytes:
        try:
            return await trio.to_thread.run_sync(self._read, self._path, abandon_on_cancel=True)
        except OSError as error:
            raise _unreadable(self._path, error) from error


async def _read(path: Path) -> bytes | None:
    try:
        return await trio.to_thread.run_sync(read_regular_bytes, path, abandon_on_cancel=True)
    except (OSError, ValueError) as error:
        if is_shortage(error):
            raise _unreadable(path, error) from error
        return None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError([Problem(f"the file cannot be read: {error.strerror or error}", str(path))])


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
