"""Bringing one servable in line with its configuration and its files: load first, retire after.

::

    list versions ─> policy chooses ─> load what is missing ─┐ a version failed: choose again without it
                          ^──────────────────────────────────┘
                     all chosen ones serve ─> retire what is not wanted
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.registry.kinds import MODEL
from ovmstrio.registry.states import ApplyResult, VersionState, VersionStatus
from ovmstrio.repository.versions import choose_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.registry.leases import Instance
    from ovmstrio.registry.marks import Marks
    from ovmstrio.registry.records import ModelRecord, VersionRecord
    from ovmstrio.registry.version_loader import VersionLoader
    from ovmstrio.repository.versions import Listing

__all__ = ["Reconciler"]

log = structlog.get_logger(__name__)

_KIND_CHANGED: Final = "Model type cannot be changed after it is loaded"


class Reconciler:
    """Loads and retires versions of one model at a time, as its configuration and its files ask for.

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

    async def reconcile(self, model: ModelRecord, *, forced: bool) -> ApplyResult:
        """Load what is missing and retire what is not wanted; ``forced`` tries again what has failed before.

        Raises: nothing for a model that cannot be listed or loaded; that is in the result and in its states.

        Cancellation: at any checkpoint; what was served goes on.
        """
        spec = model.spec
        try:
            if spec is None:
                return ApplyResult(changed=self.retire_all(model))
            listing = await self._list(model, spec)
            if listing is None:
                return ApplyResult(
                    failures=(VersionStatus(model.name, 0, VersionState.LOADING, MODEL.failed, model.problem),)
                )
            return await self._follow(model, spec, listing, forced=forced)
        finally:
            model.settled = True
            model.touch()

    def retire_all(self, model: ModelRecord) -> bool:
        """Stop giving leases for every version; tell whether there was any."""
        return self._retire_except(model, ())

    async def _list(self, model: ModelRecord, spec: ServableSpec) -> Listing | None:
        known = model.problem
        try:
            _check_kind(model, spec)
            listing = await self._marks.list(spec)
        except ConfigError as error:
            model.problem = error.message
        else:
            for warning in listing.warnings if listing.warnings != model.warnings else ():
                log.warning("model repository", model=model.name, base_path=str(spec.base_path), problem=warning)
            model.problem, model.warnings = "", listing.warnings
            return listing
        if model.problem != known:
            log.error("model cannot be served", model=model.name, reason=model.problem)
        return None

    async def _follow(self, model: ModelRecord, spec: ServableSpec, listing: Listing, *, forced: bool) -> ApplyResult:
        given_up = await self._given_up(model, spec, listing, forced=forced)
        attempted: set[int] = set()
        while True:
            broken = given_up.difference(model.available_versions())
            chosen, wanted = choose_versions(spec.version_policy, listing.versions, broken)
            # What was loaded just now counts as served, though its files may have changed meanwhile.
            settled = given_up | attempted
            missing = [v for v in chosen if not (v in settled or _is_served(model, spec, v, listing.mark))]
            if not missing:
                break
            attempted.update(missing)
            await self._load_all(model, spec, {version: listing.versions[version] for version in missing})
            given_up.update(version for version in missing if model.versions[version].failure is not None)
        retired = self._retire_except(model, wanted)
        failures = tuple(model.versions[version].status for version in sorted(attempted & given_up))
        return ApplyResult(retired or bool(attempted - given_up), failures)

    async def _given_up(self, model: ModelRecord, spec: ServableSpec, listing: Listing, *, forced: bool) -> set[int]:
        """Find the versions whose last load failed and that are not worth trying again now."""
        failed = {} if forced else {version: record for version, record in model.versions.items() if record.failure}
        return {
            version
            for version, record in failed.items()
            if version in listing.versions and not await self._is_due(record, spec, listing.versions[version])
        }

    async def _is_due(self, record: VersionRecord, spec: ServableSpec, directory: Path) -> bool:
        failure = record.failure
        if failure is None or trio.current_time() >= failure.retry_at or failure.spec.needs_reload(spec):
            return True
        return await self._marks.of(spec, directory) != failure.files

    async def _load_all(self, model: ModelRecord, spec: ServableSpec, directories: dict[int, Path]) -> None:
        async with trio.open_nursery() as nursery:
            for version, directory in directories.items():
                nursery.start_soon(self._load, model, spec, version, directory)

    async def _load(self, model: ModelRecord, spec: ServableSpec, version: int, directory: Path) -> None:
        replaced = await self._loader.load(model, spec, version, directory)
        if replaced is not None:
            self._retire(replaced, None)

    def _retire_except(self, model: ModelRecord, wanted: Collection[int]) -> bool:
        unwanted = [
            record
            for version, record in model.versions.items()
            if version not in wanted and record.state < VersionState.UNLOADING
        ]
        for record in unwanted:
            instance = model.retirement_begins(record)
            if instance is not None:
                self._retire(instance, _ending(model, record))
        return bool(unwanted)


def _ending(model: ModelRecord, record: VersionRecord) -> Callable[[], None]:
    return lambda: model.retirement_ends(record)


def _check_kind(model: ModelRecord, spec: ServableSpec) -> None:
    """Refuse to put a stateful model in the place of one without state, and the other way round: clients would fail."""
    served = [record.instance.spec for record in model.versions.values() if record.instance is not None]
    models = [each for each in (spec, *served) if isinstance(each, ModelSpec)]
    if len({each.stateful for each in models}) > 1:
        suggestion = "give it another name, or take the model out of the configuration first"
        raise ConfigError([Problem(_KIND_CHANGED, file=spec.origin, path="stateful", suggestion=suggestion)])


def _is_served(model: ModelRecord, spec: ServableSpec, version: int, mark: str) -> bool:
    """Tell whether a version is served with these settings and files, and note that they are the ones it has now."""
    record = model.versions.get(version)
    if record is None or record.instance is None or spec.errors:
        return False
    if record.instance.spec is not spec and record.instance.spec.needs_reload(spec):
        return False
    if mark and record.instance.files != mark:
        return False
    record.instance.spec = spec
    if record.failure is not None:
        model.forget_failure(record)
    return True
