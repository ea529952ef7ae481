"""One look at what the storages have, and what is made of it; the watcher has one come after the other.

::

    list ──> what changed? ──> fetch, a few at a time      all versions are kept here
    list ──> what is there                                 versions are fetched when somebody asks (caching)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
import trio

from ovmstrio.config.specs import LatestVersions
from ovmstrio.core.errors import StorageFailure
from ovmstrio.repository.versions import choose_versions
from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.shelf import Shelf
from ovmstrio.runtimes.handlers.models.sources import CopyMaker, ModelSource
from ovmstrio.runtimes.handlers.models.tree import ModelKey, Tree, VersionFiles, diff, versions_by_model

__all__ = ["StorageSync", "Validate", "WatchOptions", "keep_latest"]


def keep_latest(
    keys: Iterable[ModelKey], count: int, *, broken: Collection[ModelKey], loaded: Collection[ModelKey]
) -> frozenset[ModelKey]:
    """Choose the highest versions of each model, so many of them that are good as far as is known.

    Args:
        keys: what there is.
        count: how many of a model are wanted.
        broken: those that could not be loaded, which take nobody's place.
        loaded: those that could; the highest of them stays until a higher one has shown that it can be loaded too.
    """
    policy = LatestVersions(num_versions=count)
    kept: set[ModelKey] = set()
    for ordered in versions_by_model(keys).values():
        # Versions may have more digits than a number, so that the policy is told their ranks.
        ranked = dict(enumerate(reversed(ordered)))
        _, wanted = choose_versions(policy, ranked, [rank for rank, key in ranked.items() if key in broken])
        kept.update(ranked[rank] for rank in wanted)
        kept.update([key for key in ordered if key in loaded][:1])
    return frozenset(kept)


_T = TypeVar("_T")
_I = TypeVar("_I")

log = structlog.get_logger(__name__)

Validate = Callable[[VersionFiles], str | None]
"""Tells why a version's files cannot be used, None if they can."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How storages are followed.

    Attributes:
        interval_seconds: from the end of one look to the begin of the next.
        fetches: how many models are fetched at once.
        list_seconds: how long a storage may take to list its files.
        fetch_seconds: how long the copy of a version may take.
    """

    interval_seconds: float = 10.0
    fetches: int = 5
    list_seconds: float = 120.0
    fetch_seconds: float = 3600.0


class StorageSync:
    """Keeps a shelf's catalog as the storages are.

    Args:
        sources: where to look.
        shelf: what to tell.
        maker: makes copies.
        spec: says which versions are wanted, and whether they are fetched by those who ask for them.
        validate: says which versions to ignore; a version that was good before stays as it was then.
        options: for how long at most.

    Attributes:
        is_stale: whether the last look failed, in part at least, so that what is served may be older than it should.
        synced: set once all that there is has been seen, and fetched unless that is left to those who ask.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        shelf: Shelf,
        maker: CopyMaker,
        *,
        spec: ModelsSpec,
        validate: Validate,
        options: WatchOptions,
    ) -> None:
        self.is_stale = False
        self.synced = trio.Event()
        self._sources = sources
        self._shelf = shelf
        self._maker = maker
        self._spec = spec
        self._validate = validate
        self._options = options
        self._limiter = trio.CapacityLimiter(options.fetches)
        self._refused: dict[ModelKey, str] = {}

    async def look(self) -> bool:
        """Look once, and take over what is new; tells whether everything could be seen and fetched.

        Cancellation: at once, or when what was listed has been compared; threads that read or write then go on to the
        end of what they do, and it is dropped.
        """
        listed = await self._each(self._sources, self._list)
        is_complete = all(tree is not None for tree in listed)
        # What a storage has may be thousands of versions, which would hold up the loop.
        tree = await trio.to_thread.run_sync(self._take_over, listed)
        if not self._spec.is_cached:
            is_complete = await self._fetch_changes(tree) and is_complete
        self._note(is_complete=is_complete)
        return is_complete

    def _note(self, *, is_complete: bool) -> None:
        if self.is_stale and is_complete:
            log.info("the models are as in their storage again")
        self.is_stale = not is_complete
        if is_complete:
            self.synced.set()

    async def _list(self, source: ModelSource) -> Tree | None:
        try:
            return await self._in_thread(source.read, self._options.list_seconds, str(source))
        except StorageFailure as error:
            log.warning("models cannot be listed; those known go on to be served", reason=str(error))
            return None

    def _join(self, listed: Sequence[Tree | None]) -> dict[ModelKey, VersionFiles]:
        """Put together what was listed, and what was known before of the places that could not be."""
        joined: dict[ModelKey, VersionFiles] = {}
        for source, tree in zip(self._sources, listed, strict=True):
            joined |= self._known_of(source) if tree is None else tree
        return joined

    def _known_of(self, source: ModelSource) -> Tree:
        return {key: files for key, files in self._shelf.catalog.items() if source.has(key)}

    def _take_over(self, listed: Sequence[Tree | None]) -> Tree:
        """Give the versions that there should be; where they are fetched by those who ask, they are there then."""
        tree = self._choose(self._join(listed))
        if self._spec.is_cached:
            self._shelf.replace_catalog(tree)
        return tree

    def _choose(self, tree: Tree) -> Tree:
        valid = self._keep_valid(tree)
        latest = self._spec.latest_versions
        if latest is None:
            return valid
        failed = self._shelf.broken()
        # A version that was written anew may be good now.
        broken = {key for key in failed.keys() & valid.keys() if valid[key].fingerprint == failed[key]}
        kept = keep_latest(valid, latest, broken=broken, loaded=self._shelf.in_memory())
        return {key: valid[key] for key in valid if key in kept}

    def _keep_valid(self, tree: Tree) -> dict[ModelKey, VersionFiles]:
        """Leave out versions that cannot be used; each is told of once."""
        valid: dict[ModelKey, VersionFiles] = {}
        refused: dict[ModelKey, str] = {}
        for key, files in tree.items():
            problem = self._validate(files)
            if problem is None:
                valid[key] = files
                continue
            refused[key] = files.fingerprint
            if self._refused.get(key) != files.fingerprint:
                log.warning("a model's version cannot be used", model=key.name, version=key.version, reason=problem)
            if key in self._shelf.catalog:
                valid[key] = self._shelf.catalog[key]
        self._refused = refused
        return valid

    async def _fetch_changes(self, tree: Tree) -> bool:
        changes = await trio.to_thread.run_sync(diff, self._shelf.catalog, tree)
        fetched = await self._each(changes.written, lambda key: self._fetch(key, tree[key]))
        if changes.removed:
            log.info("models have gone", versions=sorted(map(str, changes.removed)))
            left = {key: files for key, files in self._shelf.catalog.items() if key in tree}
            await trio.to_thread.run_sync(self._shelf.replace_catalog, left)
        return all(fetched)

    async def _fetch(self, key: ModelKey, version: VersionFiles) -> bool:
        try:
            copy = await self._in_thread(partial(self._maker.make, key, version), self._options.fetch_seconds, str(key))
        except StorageFailure as error:
            log.warning("a model cannot be fetched; it is tried again", version=str(key), reason=str(error))
            return False
        self._shelf.publish(copy, version)
        log.info("a model is here", model=key.name, version=key.version)
        return True

    async def _in_thread(self, work: Callable[[], _T], seconds: float, what: str) -> _T:
        with trio.move_on_after(seconds):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        raise StorageFailure(f"{what} took longer than {seconds:g} s")

    async def _each(self, items: Sequence[_I], work: Callable[[_I], Awaitable[_T]]) -> list[_T]:
        results: dict[int, _T] = {}

        async def one(position: int, item: _I) -> None:
            results[position] = await work(item)

        async with trio.open_nursery() as nursery:
            for position, item in enumerate(items):
                nursery.start_soon(one, position, item)
        return [results[position] for position in range(len(items))]
