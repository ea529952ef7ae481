"""Which versions there are, which of them are on disk and in memory, and in what order the others have to go.

All of it behind one lock that is held for microseconds, because user code asks from its own threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
import trio

from ovmstrio.config.specs import LatestVersions
from ovmstrio.core.errors import StorageFailure
from ovmstrio.handlers.config.project_spec import ModelsSpec
from ovmstrio.handlers.models.storage import Copy, CopyMaker, ModelSource
from ovmstrio.handlers.models.version_index import LATEST, ModelKey, Tree, VersionFiles, diff, versions_by_model
from ovmstrio.isolation.thread_pool import lent_place
from ovmstrio.serving.model_versions import choose_versions

__all__ = [
    "CallLeases",
    "LoadedModel",
    "RecentlyUsed",
    "Shelf",
    "StorageSync",
    "Validate",
    "WatchOptions",
    "current_call",
    "keep_latest",
    "lease_models",
]

# ----------------------------------------------------------------------
# How long a model that user code was given stays: until the call ends in which it asked for it
# ----------------------------------------------------------------------


class CallLeases:
    """What one call of a handler holds; its threads may ask for models at the same time."""

    __slots__ = ("_held", "_is_over", "_lock")

    def __init__(self) -> None:
        self._held: dict[Hashable, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def hold(self, held: Hashable, release: Callable[[Any], None]) -> bool:
        """Keep what was leased until the call ends, when it is given back from any thread.

        False if it is kept already, or the call has ended meanwhile.
        """
        with self._lock:
            if self._is_over or held in self._held:
                return False
            self._held[held] = release
            return True

    def release_all(self) -> None:
        """Give everything back, as the call has ended."""
        with self._lock:
            self._is_over = True
            held, self._held = self._held, {}
        for each, release in held.items():
            release(each)


_current: ContextVar[CallLeases | None] = ContextVar("leases of models in this call", default=None)


def current_call() -> CallLeases | None:
    """Give what holds the models of the call that this runs in, if it runs in one."""
    return _current.get()


@contextmanager
def lease_models() -> Iterator[None]:
    """Keep the models that are asked for inside, also by threads with a copy of this context, until the block ends.

    Every call of a handler runs inside of one, to the end of its stream or callback.
    """
    leases = CallLeases()
    token = _current.set(leases)
    try:
        yield
    finally:
        _current.reset(token)
        leases.release_all()


# ----------------------------------------------------------------------
# Which versions there are, which of them are on disk and in memory, and in what order the others have to go
# ----------------------------------------------------------------------

_K = TypeVar("_K", bound=Hashable)


class RecentlyUsed(Generic[_K]):
    """What is in one place, the least recently used first.

    Args:
        limit: how many may be there, whenever what is in use allows it; None for all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._keys: OrderedDict[_K, None] = OrderedDict()

    def __contains__(self, key: _K) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[_K]:
        return iter(self._keys)

    def touch(self, key: _K) -> None:
        """Note that something is used now, if it is here."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def add(self, key: _K) -> None:
        """Note that something is here, or is about to be, as the most recently used."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def drop(self, key: _K) -> None:
        """Note that something is not here."""
        self._keys.pop(key, None)

    def evict(self, is_needed: Callable[[_K], bool]) -> list[_K]:
        """Choose what has to go, none of it needed, and take it as gone."""
        excess = 0 if self._limit is None else len(self._keys) - self._limit
        if excess <= 0:
            return []
        victims = [key for key in self._keys if not is_needed(key)][:excess]
        for key in victims:
            del self._keys[key]
        return victims


@dataclass(slots=True, eq=False)
class LoadedModel:
    """What ``load_model`` made of a copy."""

    copy: Copy
    value: Any


class Shelf:
    """Everything about the models that the calls of user code and the task that watches the storage share.

    Args:
        memory_limit: how many versions may be in memory, whenever what is in use allows it; None for all.
        disk_limit: how many may be on disk, no fewer than in memory; None for all.
        on_trash: is told that there is something for :meth:`take_trash`; called from any thread.
    """

    def __init__(self, memory_limit: int | None, disk_limit: int | None, on_trash: Callable[[], None]) -> None:
        self._in_memory = RecentlyUsed[ModelKey](memory_limit)
        self._on_disk = RecentlyUsed[ModelKey](disk_limit)
        self._on_trash = on_trash
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._loading: set[ModelKey] = set()
        self._catalog: dict[ModelKey, VersionFiles] = {}
        self._newest: dict[str, tuple[ModelKey, ...]] = {}
        self._copies: dict[ModelKey, Copy] = {}
        self._loaded: dict[ModelKey, LoadedModel] = {}
        self._broken: dict[ModelKey, str] = {}
        self._unreachable: set[ModelKey] = set()
        self._fetching: set[ModelKey] = set()
        self._trash: list[Copy] = []
        self._dropped: list[LoadedModel] = []

    # What there is

    @property
    def catalog(self) -> Tree:
        """The versions that may be asked for."""
        return self._catalog

    def versions(self, name: str) -> tuple[ModelKey, ...]:
        """The versions of a model, the highest first."""
        return self._newest.get(name, ())

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Find a version by its number, or the highest one that can be loaded as far as is known."""
        with self._lock:
            return self._resolve(name, version)

    def replace_catalog(self, tree: Tree) -> None:
        """Take over what the storage has now; what is not there any more goes."""
        # Sorted before, as calls of user code wait for the lock.
        catalog, newest = dict(tree), versions_by_model(tree)
        with self._lock:
            self._unreachable.clear()
            for key in self._catalog.keys() - catalog.keys():
                self._forget(key)
            self._catalog, self._newest = catalog, newest
        self._tidy()

    def publish(self, copy: Copy, version: VersionFiles) -> None:
        """Offer a version whose new copy is complete."""
        with self._lock:
            self._set_copy(copy)
            self._catalog = {**self._catalog, copy.key: version}
            self._newest = {**self._newest, **versions_by_model({*self.versions(copy.key.name), copy.key})}
        self._tidy()

    def broken(self) -> dict[ModelKey, str]:
        """Give the versions that could not be loaded, with their fingerprints then."""
        with self._lock:
            return dict(self._broken)

    def in_memory(self) -> frozenset[ModelKey]:
        """Give the versions that are loaded."""
        with self._lock:
            return frozenset(self._loaded)

    def metadata(self) -> dict[str, dict[str, list[Any]]]:
        """Describe the models: their versions, the highest first, and when each was written."""
        with self._lock:
            catalog, newest = self._catalog, self._newest
        return {
            name: {
                "versions": [key.version for key in keys],
                "timestamps": [catalog[key].timestamp for key in keys],
            }
            for name, keys in sorted(newest.items())
        }

    # In use

    def find(self, name: str, version: str) -> LoadedModel | None:
        """Find a model in memory that need not be loaded again, lease it to the current call, and note its use."""
        with self._lock:
            key = self._resolve(name, version)
            loaded = None if key is None else self._current(key)
            if loaded is not None:
                self._in_memory.touch(loaded.copy.key)
                self._on_disk.touch(loaded.copy.key)
                self._lease_to_call(loaded.copy)
            return loaded

    def release(self, copy: Copy) -> None:
        """Take back what was leased."""
        with self._lock:
            self._give_back(copy)
        self._tidy()

    # Loading

    def begin_load(self, key: ModelKey) -> tuple[VersionFiles | None, Copy | None]:
        """Keep a version where it is, and other loads of it waiting, until :meth:`end_load`.

        Gives what is to be loaded, and its copy if there is one, which may be an older one.
        """
        while True:
            with self._lock:
                if key not in self._loading:
                    self._loading.add(key)
                    copy = self._copies.get(key)
                    if copy is not None:
                        copy.uses += 1
                    return self._catalog.get(key), copy
            # Whoever loads it may need the place in which this waits.
            with lent_place(), self._load_ended:
                self._load_ended.wait_for(lambda: key not in self._loading)

    def end_load(self, key: ModelKey, copy: Copy | None) -> None:
        """End what :meth:`begin_load` began; the caller empties the trash."""
        with self._load_ended:
            self._loading.remove(key)
            self._load_ended.notify_all()
            if copy is not None:
                self._give_back(copy)
        self._evict()

    def make_room(self, key: ModelKey) -> None:
        """Have others leave the memory for what is about to come there; the caller empties the trash."""
        with self._lock:
            self._in_memory.add(key)
        self._evict()

    def begin_fetch(self, key: ModelKey) -> None:
        """Have others leave the disk for what is about to come there; the caller empties the trash.

        Until :meth:`end_fetch` what is here serves those who ask for it meanwhile.
        """
        with self._lock:
            self._fetching.add(key)
            self._on_disk.add(key)
        self._evict()

    def end_fetch(self, key: ModelKey) -> None:
        """Note that a fetch has ended, well or not; those who could not be fetched are told of with the failure."""
        with self._lock:
            self._fetching.discard(key)

    def replace_copy(self, copy: Copy, old: Copy | None) -> None:
        """Keep a new copy of a version, as if it had been there at :meth:`begin_load` instead of the old one."""
        with self._lock:
            copy.uses += 1
            self._set_copy(copy)
            if old is not None:
                self._give_back(old)

    def put(self, loaded: LoadedModel) -> None:
        """Keep a loaded model in memory, unless it has gone from the storage, and lease it to the current call."""
        key = loaded.copy.key
        with self._lock:
            if key in self._catalog:
                self._drop_loaded(key)
                self._loaded[key] = loaded
                self._broken.pop(key, None)
                self._in_memory.add(key)
            else:
                self._forget(key)
            self._lease_to_call(loaded.copy)

    def keep_old(self, key: ModelKey, failed: VersionFiles, *, is_unreachable: bool) -> tuple[LoadedModel | None, bool]:
        """Note that a version cannot be loaded, or not be fetched now; it is not tried again while the old one serves.

        Gives the old model, leased to the current call, and whether the failure is news.
        """
        with self._lock:
            is_news = self._broken.get(key) != failed.fingerprint and key not in self._unreachable
            if key not in self._catalog:
                self._forget(key)
            elif is_unreachable:
                self._unreachable.add(key)
            else:
                self._broken[key] = failed.fingerprint
            loaded = self._loaded.get(key)
            if loaded is None:
                self._in_memory.drop(key)
            else:
                self._lease_to_call(loaded.copy)
            if key not in self._copies:
                self._on_disk.drop(key)
            return loaded, is_news

    # Going

    def take_trash(self) -> list[Copy]:
        """Give the copies whose files are not needed any more, for the caller to remove."""
        with self._lock:
            trash, self._trash = self._trash, []
            return trash

    def copies(self) -> dict[ModelKey, Copy]:
        """Give the copies of versions that are on disk."""
        with self._lock:
            return dict(self._copies)

    def counts(self) -> tuple[int, int]:
        """Tell how many versions are in memory, and on disk."""
        with self._lock:
            return len(self._loaded), len(self._copies)

    def _tidy(self) -> None:
        if self._evict():
            self._on_trash()

    def _evict(self) -> bool:
        """Have everything go that is above the limits and not in use; tells whether there is trash then."""
        with self._lock:
            for key in self._in_memory.evict(self._is_in_use):
                self._drop_loaded(key)
            for key in self._on_disk.evict(lambda key: key in self._in_memory or self._is_in_use(key)):
                self._drop_copy(key)
            # Objects of users may do anything when they go, hence not inside the lock.
            dropped, self._dropped = self._dropped, []
            has_trash = bool(self._trash)
        del dropped
        return has_trash

    def _resolve(self, name: str, version: str) -> ModelKey | None:
        if version != LATEST:
            key = ModelKey(name, version)
            return key if key in self._catalog else None
        keys = self._newest.get(name, ())
        coming: ModelKey | None = None
        for key in keys:
            is_broken = self._broken.get(key) == self._catalog[key].fingerprint or key in self._unreachable
            if key in self._loaded:
                return key
            if is_broken:
                continue
            if key in self._fetching:
                coming = coming or key
            elif coming is None or key in self._copies:
                return key
        return coming or (keys[0] if keys else None)

    def _current(self, key: ModelKey) -> LoadedModel | None:
        loaded = self._loaded.get(key)
        if loaded is None:
            return None
        wanted = self._catalog[key].fingerprint
        is_best = loaded.copy.fingerprint == wanted or self._broken.get(key) == wanted
        return loaded if is_best or key in self._unreachable or key in self._fetching else None

    def _set_copy(self, copy: Copy) -> None:
        self._drop_copy(copy.key)
        self._copies[copy.key] = copy
        self._on_disk.add(copy.key)

    def _drop_copy(self, key: ModelKey) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            self._discard_unused(copy)

    def _drop_loaded(self, key: ModelKey) -> None:
        loaded = self._loaded.pop(key, None)
        if loaded is not None:
            self._discard_unused(loaded.copy)
            self._dropped.append(loaded)

    def _forget(self, key: ModelKey) -> None:
        self._drop_copy(key)
        self._drop_loaded(key)
        self._in_memory.drop(key)
        self._on_disk.drop(key)
        self._broken.pop(key, None)
        self._unreachable.discard(key)

    def _lease_to_call(self, copy: Copy) -> None:
        call = current_call()
        if call is not None and call.hold(copy, self.release):
            copy.uses += 1

    def _give_back(self, copy: Copy) -> None:
        copy.uses -= 1
        self._discard_unused(copy)

    def _discard_unused(self, copy: Copy) -> None:
        """Have a copy's files removed unless somebody needs them, or they may be asked for again."""
        loaded = self._loaded.get(copy.key)
        is_kept = self._copies.get(copy.key) is copy or (loaded is not None and loaded.copy is copy)
        if not (copy.uses or is_kept):
            self._trash.append(copy)

    def _is_in_use(self, key: ModelKey) -> bool:
        copy, loaded = self._copies.get(key), self._loaded.get(key)
        return bool(key in self._loading or (copy and copy.uses) or (loaded and loaded.copy.uses))


# ----------------------------------------------------------------------
# One look at what the storages have, and what is made of it; the watcher has one come after the other
# ----------------------------------------------------------------------


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
