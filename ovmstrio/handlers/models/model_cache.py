"""LRU cache of model versions in memory and on disk, leased to handler calls and synchronized with the storages.

User code calls the cache from its own threads, so one lock guards all state. The lock is held for microseconds only.
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
from ovmstrio.handlers.models.version_index import (
    LATEST,
    ModelKey,
    VersionFiles,
    VersionIndex,
    diff_indexes,
    versions_by_model,
)
from ovmstrio.isolation.thread_pool import release_place_while_waiting
from ovmstrio.serving.model_versions import choose_versions


class ModelLeases:
    """Models leased to one call of a handler; thread-safe."""

    __slots__ = ("_held", "_is_over", "_lock")

    def __init__(self) -> None:
        self._held: dict[Hashable, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def hold(self, held: Hashable, release: Callable[[Any], None]) -> bool:
        """Keep a lease until the call ends; return False if the call holds it already or has ended.

        ``release`` may be called from any thread.
        """
        with self._lock:
            if self._is_over or held in self._held:
                return False
            self._held[held] = release
            return True

    def release_all(self) -> None:
        """Release all leases at the end of the call."""
        with self._lock:
            self._is_over = True
            held, self._held = self._held, {}
        for each, release in held.items():
            release(each)


_current: ContextVar[ModelLeases | None] = ContextVar("model leases", default=None)


def current_leases() -> ModelLeases | None:
    """Return the leases of the current call; None outside a call."""
    return _current.get()


@contextmanager
def lease_models() -> Iterator[None]:
    """Keep the models requested in this context, and in threads with a copy of it, until the block ends.

    Every call of a handler runs in such a block, up to the end of its stream or callback.
    """
    leases = ModelLeases()
    token = _current.set(leases)
    try:
        yield
    finally:
        _current.reset(token)
        leases.release_all()


# Model cache

_K = TypeVar("_K", bound=Hashable)


class LruKeys(Generic[_K]):
    """Keys in order of use, least recently used first; over ``limit`` only while keys are in use."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._keys: OrderedDict[_K, None] = OrderedDict()

    def __contains__(self, key: _K) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[_K]:
        return iter(self._keys)

    def touch(self, key: _K) -> None:
        """Mark a key as most recently used, if present."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def add(self, key: _K) -> None:
        """Add a key as the most recently used."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def drop(self, key: _K) -> None:
        """Remove a key, if present."""
        self._keys.pop(key, None)

    def evict(self, is_needed: Callable[[_K], bool]) -> list[_K]:
        """Remove and return the least recently used keys over the limit, except needed keys."""
        excess = 0 if self._limit is None else len(self._keys) - self._limit
        if excess <= 0:
            return []
        victims = [key for key in self._keys if not is_needed(key)][:excess]
        for key in victims:
            del self._keys[key]
        return victims


@dataclass(slots=True, eq=False)
class LoadedModel:
    """Result of ``load_model`` for one copy."""

    copy: Copy
    value: Any


class ModelCache:
    """Versions of models: catalog of the storages, copies on disk, and models in memory; thread-safe.

    The limits are numbers of versions, exceeded only while versions are in use; None for no limit. ``on_trash`` is
    called from any thread when :meth:`take_trash` has copies to return.
    """

    def __init__(self, memory_limit: int | None, disk_limit: int | None, on_trash: Callable[[], None]) -> None:
        self._in_memory = LruKeys[ModelKey](memory_limit)
        self._on_disk = LruKeys[ModelKey](disk_limit)
        self._on_unused_copies = on_trash
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._loading: set[ModelKey] = set()
        self._catalog: dict[ModelKey, VersionFiles] = {}
        self._newest: dict[str, tuple[ModelKey, ...]] = {}
        self._copies: dict[ModelKey, Copy] = {}
        self._loaded: dict[ModelKey, LoadedModel] = {}
        self._failed: dict[ModelKey, str] = {}
        self._undownloadable: set[ModelKey] = set()
        self._fetching: set[ModelKey] = set()
        self._unused_copies: list[Copy] = []
        self._dropped: list[LoadedModel] = []

    # Catalog

    @property
    def catalog(self) -> VersionIndex:
        """Versions that can be requested."""
        return self._catalog

    def versions(self, name: str) -> tuple[ModelKey, ...]:
        """Return the versions of a model, highest first."""
        return self._newest.get(name, ())

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Return the key of a version; for ``latest`` the highest version not known to fail."""
        with self._lock:
            return self._resolve(name, version)

    def replace_catalog(self, tree: VersionIndex) -> None:
        """Replace the catalog with the contents of the storages; drop versions that were removed."""
        # Sorted outside the lock, which calls of user code wait for.
        catalog, newest = dict(tree), versions_by_model(tree)
        with self._lock:
            self._undownloadable.clear()
            for key in self._catalog.keys() - catalog.keys():
                self._forget(key)
            self._catalog, self._newest = catalog, newest
        self._evict_and_notify()

    def publish(self, copy: Copy, version: VersionFiles) -> None:
        """Add a version with a complete new copy."""
        with self._lock:
            self._set_copy(copy)
            self._catalog = {**self._catalog, copy.key: version}
            self._newest = {**self._newest, **versions_by_model({*self.versions(copy.key.name), copy.key})}
        self._evict_and_notify()

    def failed_versions(self) -> dict[ModelKey, str]:
        """Return the versions that failed to load, with their fingerprints at that time."""
        with self._lock:
            return dict(self._failed)

    def loaded_keys(self) -> frozenset[ModelKey]:
        """Return the versions in memory."""
        with self._lock:
            return frozenset(self._loaded)

    def metadata(self) -> dict[str, dict[str, list[Any]]]:
        """Return the versions of each model, highest first, and their modification times."""
        with self._lock:
            catalog, newest = self._catalog, self._newest
        return {
            name: {
                "versions": [key.version for key in keys],
                "timestamps": [catalog[key].timestamp for key in keys],
            }
            for name, keys in sorted(newest.items())
        }

    # Leases

    def find(self, name: str, version: str) -> LoadedModel | None:
        """Lease an up-to-date model in memory to the current call; None if the model must be loaded."""
        with self._lock:
            key = self._resolve(name, version)
            loaded = None if key is None else self._current(key)
            if loaded is not None:
                self._in_memory.touch(loaded.copy.key)
                self._on_disk.touch(loaded.copy.key)
                self._lease_to_call(loaded.copy)
            return loaded

    def release(self, copy: Copy) -> None:
        """Return a lease."""
        with self._lock:
            self._return_copy(copy)
        self._evict_and_notify()

    # Loading

    def lock_for_load(self, key: ModelKey) -> tuple[VersionFiles | None, Copy | None]:
        """Lock a version until :meth:`end_load`; concurrent loads of the version wait.

        Returns the files to load, and the copy on disk, which may be outdated.
        """
        while True:
            with self._lock:
                if key not in self._loading:
                    self._loading.add(key)
                    copy = self._copies.get(key)
                    if copy is not None:
                        copy.uses += 1
                    return self._catalog.get(key), copy
            # The loading call may need the thread-pool slot of this call.
            with release_place_while_waiting(), self._load_ended:
                self._load_ended.wait_for(lambda: key not in self._loading)

    def unlock_after_load(self, key: ModelKey, copy: Copy | None) -> None:
        """End a load; the caller removes unused copies."""
        with self._load_ended:
            self._loading.remove(key)
            self._load_ended.notify_all()
            if copy is not None:
                self._return_copy(copy)
        self._evict()

    def reserve_memory(self, key: ModelKey) -> None:
        """Evict other models from memory before a load; the caller removes unused copies."""
        with self._lock:
            self._in_memory.add(key)
        self._evict()

    def start_download(self, key: ModelKey) -> None:
        """Evict other copies from disk before a download; the caller removes unused copies.

        Until :meth:`end_fetch`, requests for this version use the old copy.
        """
        with self._lock:
            self._fetching.add(key)
            self._on_disk.add(key)
        self._evict()

    def finish_download(self, key: ModelKey) -> None:
        """End a download, successful or not."""
        with self._lock:
            self._fetching.discard(key)

    def replace_copy(self, copy: Copy, old: Copy | None) -> None:
        """Replace the copy that :meth:`begin_load` returned."""
        with self._lock:
            copy.uses += 1
            self._set_copy(copy)
            if old is not None:
                self._return_copy(old)

    def put(self, loaded: LoadedModel) -> None:
        """Add a loaded model, unless the storage no longer has its version, and lease it to the current call."""
        key = loaded.copy.key
        with self._lock:
            if key in self._catalog:
                self._drop_loaded(key)
                self._loaded[key] = loaded
                self._failed.pop(key, None)
                self._in_memory.add(key)
            else:
                self._forget(key)
            self._lease_to_call(loaded.copy)

    def record_failure(
        self, key: ModelKey, failed: VersionFiles, *, is_unreachable: bool
    ) -> tuple[LoadedModel | None, bool]:
        """Record that a version failed to load or download; it is not retried while the old model serves.

        Returns the old model, leased to the current call, and whether the failure is new.
        """
        with self._lock:
            is_news = self._failed.get(key) != failed.fingerprint and key not in self._undownloadable
            if key not in self._catalog:
                self._forget(key)
            elif is_unreachable:
                self._undownloadable.add(key)
            else:
                self._failed[key] = failed.fingerprint
            loaded = self._loaded.get(key)
            if loaded is None:
                self._in_memory.drop(key)
            else:
                self._lease_to_call(loaded.copy)
            if key not in self._copies:
                self._on_disk.drop(key)
            return loaded, is_news

    # Eviction

    def take_unused_copies(self) -> list[Copy]:
        """Return the copies whose files are no longer needed; the caller removes them."""
        with self._lock:
            unused, self._unused_copies = self._unused_copies, []
            return unused

    def copies(self) -> dict[ModelKey, Copy]:
        """Return the copies on disk."""
        with self._lock:
            return dict(self._copies)

    def counts(self) -> tuple[int, int]:
        """Return the number of versions in memory and on disk."""
        with self._lock:
            return len(self._loaded), len(self._copies)

    def _evict_and_notify(self) -> None:
        if self._evict():
            self._on_unused_copies()

    def _evict(self) -> bool:
        with self._lock:
            for key in self._in_memory.evict(self._is_in_use):
                self._drop_loaded(key)
            for key in self._on_disk.evict(lambda key: key in self._in_memory or self._is_in_use(key)):
                self._drop_copy(key)
            # User objects are released outside the lock: their destructors may run any code.
            dropped, self._dropped = self._dropped, []
            has_unused_copies = bool(self._unused_copies)
        del dropped
        return has_unused_copies

    def _resolve(self, name: str, version: str) -> ModelKey | None:
        if version != LATEST:
            key = ModelKey(name, version)
            return key if key in self._catalog else None
        keys = self._newest.get(name, ())
        downloading: ModelKey | None = None
        for key in keys:
            is_failed = self._failed.get(key) == self._catalog[key].fingerprint or key in self._undownloadable
            if key in self._loaded:
                return key
            if is_failed:
                continue
            if key in self._fetching:
                downloading = downloading or key
            elif downloading is None or key in self._copies:
                return key
        return downloading or (keys[0] if keys else None)

    def _current(self, key: ModelKey) -> LoadedModel | None:
        loaded = self._loaded.get(key)
        if loaded is None:
            return None
        wanted = self._catalog[key].fingerprint
        is_best = loaded.copy.fingerprint == wanted or self._failed.get(key) == wanted
        return loaded if is_best or key in self._undownloadable or key in self._fetching else None

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
        self._failed.pop(key, None)
        self._undownloadable.discard(key)

    def _lease_to_call(self, copy: Copy) -> None:
        call = current_leases()
        if call is not None and call.hold(copy, self.release):
            copy.uses += 1

    def _return_copy(self, copy: Copy) -> None:
        copy.uses -= 1
        self._discard_unused(copy)

    def _discard_unused(self, copy: Copy) -> None:
        loaded = self._loaded.get(copy.key)
        is_kept = self._copies.get(copy.key) is copy or (loaded is not None and loaded.copy is copy)
        if not (copy.uses or is_kept):
            self._unused_copies.append(copy)

    def _is_in_use(self, key: ModelKey) -> bool:
        copy, loaded = self._copies.get(key), self._loaded.get(key)
        return bool(key in self._loading or (copy and copy.uses) or (loaded and loaded.copy.uses))


# Synchronization with storages


def keep_latest(
    keys: Iterable[ModelKey], count: int, *, failed: Collection[ModelKey], loaded: Collection[ModelKey]
) -> frozenset[ModelKey]:
    """Return the ``count`` highest versions of each model that are not known to fail.

    Failed versions do not count. The highest loaded version stays until a higher one is known to load.
    """
    policy = LatestVersions(num_versions=count)
    kept: set[ModelKey] = set()
    for ordered in versions_by_model(keys).values():
        # The policy gets ranks: version numbers may exceed the digits that int() accepts.
        ranked = dict(enumerate(reversed(ordered)))
        _, wanted = choose_versions(policy, ranked, [rank for rank, key in ranked.items() if key in failed])
        kept.update(ranked[rank] for rank in wanted)
        kept.update([key for key in ordered if key in loaded][:1])
    return frozenset(kept)


_T = TypeVar("_T")
_I = TypeVar("_I")

log = structlog.get_logger(__name__)

Validate = Callable[[VersionFiles], str | None]
"""Returns the reason why a version's files are unusable; None if they are usable."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Limits of the storage synchronization.

    Attributes:
        interval_seconds: from the end of one synchronization to the start of the next.
        fetches: concurrent downloads.
        fetch_seconds: timeout of a download of one version.
    """

    interval_seconds: float = 10.0
    fetches: int = 5
    list_seconds: float = 120.0
    fetch_seconds: float = 3600.0


class StorageSync:
    """Synchronization of the model cache with the storages.

    Args:
        validate: rejects versions; a rejected version that was valid before stays as it was.

    Attributes:
        is_stale: whether the last synchronization failed at least in part.
        synced: set after the first complete synchronization, downloads included unless the project caches models.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        cache: ModelCache,
        copy_maker: CopyMaker,
        *,
        spec: ModelsSpec,
        validate: Validate,
        options: WatchOptions,
    ) -> None:
        self.is_stale = False
        self.synced = trio.Event()
        self._sources = sources
        self._cache = cache
        self._maker = copy_maker
        self._spec = spec
        self._validate = validate
        self._options = options
        self._limiter = trio.CapacityLimiter(options.fetches)
        self._refused: dict[ModelKey, str] = {}

    async def synchronize(self) -> bool:
        """Synchronize once; return whether all listings and downloads succeeded.

        Cancellation: at once, or after the comparison; threads that read or write finish and their results are dropped.
        """
        listed = await self._for_each(self._sources, self._list)
        is_complete = all(tree is not None for tree in listed)
        # In a thread: thousands of versions would block the event loop.
        tree = await trio.to_thread.run_sync(self._apply_listing, listed)
        if not self._spec.is_cached:
            is_complete = await self._fetch_changes(tree) and is_complete
        if self.is_stale and is_complete:
            log.info("model storage sync recovered")
        self.is_stale = not is_complete
        if is_complete:
            self.synced.set()
        return is_complete

    async def _list(self, source: ModelSource) -> VersionIndex | None:
        try:
            return await self._in_thread(source.read, self._options.list_seconds, str(source))
        except StorageFailure as error:
            log.warning("model storage listing failed", reason=str(error))
            return None

    def _merge(self, listed: Sequence[VersionIndex | None]) -> dict[ModelKey, VersionFiles]:
        joined: dict[ModelKey, VersionFiles] = {}
        for source, tree in zip(self._sources, listed, strict=True):
            if tree is None:
                joined |= {key: files for key, files in self._cache.catalog.items() if source.has(key)}
            else:
                joined |= tree
        return joined

    def _apply_listing(self, listed: Sequence[VersionIndex | None]) -> VersionIndex:
        tree = self._select_versions(self._merge(listed))
        if self._spec.is_cached:
            self._cache.replace_catalog(tree)
        return tree

    def _select_versions(self, tree: VersionIndex) -> VersionIndex:
        valid = self._valid_versions(tree)
        latest = self._spec.latest_versions
        if latest is None:
            return valid
        failed = self._cache.failed_versions()
        # A version that failed with other files may load now.
        broken = {key for key in failed.keys() & valid.keys() if valid[key].fingerprint == failed[key]}
        kept = keep_latest(valid, latest, failed=broken, loaded=self._cache.loaded_keys())
        return {key: valid[key] for key in valid if key in kept}

    def _valid_versions(self, tree: VersionIndex) -> dict[ModelKey, VersionFiles]:
        valid: dict[ModelKey, VersionFiles] = {}
        refused: dict[ModelKey, str] = {}
        for key, files in tree.items():
            problem = self._validate(files)
            if problem is None:
                valid[key] = files
                continue
            refused[key] = files.fingerprint
            if self._refused.get(key) != files.fingerprint:
                log.warning("model version rejected", model=key.name, version=key.version, reason=problem)
            if key in self._cache.catalog:
                valid[key] = self._cache.catalog[key]
        self._refused = refused
        return valid

    async def _fetch_changes(self, tree: VersionIndex) -> bool:
        changes = await trio.to_thread.run_sync(diff_indexes, self._cache.catalog, tree)
        fetched = await self._for_each(changes.written, lambda key: self._fetch(key, tree[key]))
        if changes.removed:
            log.info("model versions removed", versions=sorted(map(str, changes.removed)))
            left = {key: files for key, files in self._cache.catalog.items() if key in tree}
            await trio.to_thread.run_sync(self._cache.replace_catalog, left)
        return all(fetched)

    async def _fetch(self, key: ModelKey, version: VersionFiles) -> bool:
        try:
            copy = await self._in_thread(partial(self._maker.make, key, version), self._options.fetch_seconds, str(key))
        except StorageFailure as error:
            log.warning("model download failed", version=str(key), reason=str(error))
            return False
        self._cache.publish(copy, version)
        log.info("model version downloaded", model=key.name, version=key.version)
        return True

    async def _in_thread(self, work: Callable[[], _T], seconds: float, what: str) -> _T:
        with trio.move_on_after(seconds):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        raise StorageFailure(f"{what} took longer than {seconds:g} s")

    async def _for_each(self, items: Sequence[_I], work: Callable[[_I], Awaitable[_T]]) -> list[_T]:
        results: dict[int, _T] = {}

        async def one(position: int, item: _I) -> None:
            results[position] = await work(item)

        async with trio.open_nursery() as nursery:
            for position, item in enumerate(items):
                nursery.start_soon(one, position, item)
        return [results[position] for position in range(len(items))]
