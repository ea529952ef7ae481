"""Which versions there are, which of them are on disk and in memory, and in what order the others have to go.

All of it behind one lock that is held for microseconds, because user code asks from its own threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ovmstrio.runtimes.handlers.models.copies import Copy
from ovmstrio.runtimes.handlers.models.leases import current_call
from ovmstrio.runtimes.handlers.models.tree import LATEST, ModelKey, Tree, VersionFiles, newest_first
from ovmstrio.runtimes.handlers.models.usage import UsagePolicy

__all__ = ["Loaded", "Shelf"]


@dataclass(slots=True, eq=False)
class Loaded:
    """What ``load_model`` made of a copy."""

    copy: Copy
    value: Any


class Shelf:
    """Everything about the models that the calls of user code and the task that watches the storage share.

    Args:
        policy: decides what stays.
        on_trash: is told that there is something for :meth:`take_trash`; called from any thread.
    """

    def __init__(self, policy: UsagePolicy[ModelKey], on_trash: Callable[[], None]) -> None:
        self._policy = policy
        self._on_trash = on_trash
        self._lock = threading.Lock()
        self._catalog: dict[ModelKey, VersionFiles] = {}
        self._newest: dict[str, tuple[ModelKey, ...]] = {}
        self._copies: dict[ModelKey, Copy] = {}
        self._loaded: dict[ModelKey, Loaded] = {}
        self._broken: dict[ModelKey, str] = {}
        self._unreachable: set[ModelKey] = set()
        self._trash: list[Copy] = []
        self._dropped: list[Loaded] = []

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
        catalog, newest = dict(tree), _newest(tree)
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
            self._newest = {**self._newest, **_newest({*self.versions(copy.key.name), copy.key})}
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

    def find(self, name: str, version: str) -> Loaded | None:
        """Find a model in memory that need not be loaded again, lease it to the current call, and note its use."""
        with self._lock:
            key = self._resolve(name, version)
            loaded = None if key is None else self._current(key)
            if loaded is not None:
                self._policy.touch(loaded.copy.key)
                self._lease_to_call(loaded.copy)
            return loaded

    def release(self, copy: Copy) -> None:
        """Take back what was leased."""
        with self._lock:
            self._policy.release(copy.key)
            self._unpin(copy)
        self._tidy()

    # Loading

    def begin_load(self, key: ModelKey) -> tuple[VersionFiles | None, Copy | None]:
        """Keep a version where it is until :meth:`end_load`; gives what is to be loaded, and its copy if there is one.

        The copy may be an older one.
        """
        with self._lock:
            self._policy.lease(key)
            copy = self._copies.get(key)
            if copy is not None:
                copy.pins += 1
            return self._catalog.get(key), copy

    def end_load(self, key: ModelKey, copy: Copy | None) -> None:
        """End what :meth:`begin_load` began; the caller empties the trash."""
        with self._lock:
            self._policy.release(key)
            if copy is not None:
                self._unpin(copy)
        self._evict()

    def make_room_on_disk(self, key: ModelKey) -> None:
        """Have others leave the disk for a copy that is about to be made; the caller empties the trash."""
        with self._lock:
            self._policy.add_to_disk(key)
        self._evict()

    def make_room_in_memory(self, key: ModelKey) -> None:
        """Have others leave the memory for a model that is about to be loaded; the caller empties the trash."""
        with self._lock:
            self._policy.add_to_memory(key)
        self._evict()

    def replace_copy(self, copy: Copy, old: Copy | None) -> None:
        """Keep a new copy of a version, as if it had been there at :meth:`begin_load` instead of the old one."""
        with self._lock:
            copy.pins += 1
            self._set_copy(copy)
            if old is not None:
                self._unpin(old)

    def put(self, loaded: Loaded) -> None:
        """Keep a loaded model in memory, unless it has gone from the storage, and lease it to the current call."""
        key = loaded.copy.key
        with self._lock:
            if key in self._catalog:
                loaded.copy.pins += 1
                self._drop_loaded(key)
                self._loaded[key] = loaded
                self._broken.pop(key, None)
                self._policy.add_to_memory(key)
            else:
                self._forget(key)
            self._lease_to_call(loaded.copy)

    def keep_old(self, key: ModelKey, failed: VersionFiles, *, is_unreachable: bool) -> tuple[Loaded | None, bool]:
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
                self._policy.drop_from_memory(key)
            else:
                self._lease_to_call(loaded.copy)
            if key not in self._copies:
                self._policy.drop_from_disk(key)
            return loaded, is_news

    # Going

    def clear(self) -> None:
        """Forget everything, as nobody asks any more."""
        self.replace_catalog({})

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
            for key in self._policy.evict_from_memory():
                self._drop_loaded(key)
            for key in self._policy.evict_from_disk():
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
        for key in keys:
            is_broken = self._broken.get(key) == self._catalog[key].fingerprint or key in self._unreachable
            if key in self._loaded or not is_broken:
                return key
        return keys[0] if keys else None

    def _current(self, key: ModelKey) -> Loaded | None:
        loaded = self._loaded.get(key)
        if loaded is None:
            return None
        wanted = self._catalog[key].fingerprint
        if loaded.copy.fingerprint == wanted or self._broken.get(key) == wanted or key in self._unreachable:
            return loaded
        return None

    def _set_copy(self, copy: Copy) -> None:
        self._drop_copy(copy.key)
        copy.pins += 1
        self._copies[copy.key] = copy
        self._policy.add_to_disk(copy.key)

    def _drop_copy(self, key: ModelKey) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            self._unpin(copy)

    def _drop_loaded(self, key: ModelKey) -> None:
        loaded = self._loaded.pop(key, None)
        if loaded is not None:
            self._unpin(loaded.copy)
            self._dropped.append(loaded)

    def _forget(self, key: ModelKey) -> None:
        self._drop_copy(key)
        self._drop_loaded(key)
        self._policy.drop_from_memory(key)
        self._policy.drop_from_disk(key)
        self._broken.pop(key, None)
        self._unreachable.discard(key)

    def _lease_to_call(self, copy: Copy) -> None:
        call = current_call()
        if call is not None and call.hold(copy, self):
            copy.pins += 1
            self._policy.lease(copy.key)

    def _unpin(self, copy: Copy) -> None:
        copy.pins -= 1
        if copy.pins == 0:
            self._trash.append(copy)


def _newest(keys: Iterable[ModelKey]) -> dict[str, tuple[ModelKey, ...]]:
    """Sort versions by their models, the highest first."""
    names: dict[str, list[str]] = {}
    for key in keys:
        names.setdefault(key.name, []).append(key.version)
    return {
        name: tuple(ModelKey(name, version) for version in newest_first(versions)) for name, versions in names.items()
    }
