"""Bringing one servable in line with its configuration and its files: load first, retire after.

::

    list versions ─> policy chooses ─> load what is missing ─┐ a version failed: choose again without it
                          ^──────────────────────────────────┘
                     all chosen ones serve ─> retire what is not wanted
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.registry.records import error_code_of
from ovmstrio.registry.states import ApplyResult, VersionState, VersionStatus
from ovmstrio.registry.version_loader import problems_of
from ovmstrio.repository.versions import choose_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.registry.instances import Instance
    from ovmstrio.registry.order import Marks
    from ovmstrio.registry.records import ServiceRecord, VersionRecord
    from ovmstrio.registry.version_loader import VersionLoader
    from ovmstrio.repository.versions import Listing

__all__ = ["Reconciler"]

log = structlog.get_logger(__name__)


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
