"""Finds models for those who ask, and loads them at most once at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import trio

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import Overloaded, StorageFailure
from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.handlers.models.fetching import MAX_WAITING, StorageThreads
from ovmstrio.runtimes.handlers.models.shelf import LoadedModel, Shelf
from ovmstrio.runtimes.handlers.models.sources import Copy, CopyMaker
from ovmstrio.runtimes.handlers.models.tree import LATEST, ModelKey, VersionFiles

__all__ = ["LoadModel", "ModelLoader"]

log = structlog.get_logger(__name__)

LoadModel = Callable[[str], Any]
"""Loads a model from its folder."""


class ModelLoader:
    """Gives models; it blocks, and may be asked from any thread.

    While a version is fetched, others get its old copy if that is in memory, and if they ask for the latest version the
    latest one that is here; who waits lends the place of the thread.

    Args:
        shelf: what is here.
        maker: removes copies.
        storage: fetches them.

    Attributes:
        load_model: makes of a version's folder what is given.
    """

    def __init__(self, shelf: Shelf, maker: CopyMaker, storage: StorageThreads) -> None:
        self.load_model: LoadModel | None = None
        self._shelf = shelf
        self._maker = maker
        self._storage = storage
        self._limiter = trio.CapacityLimiter(2 * MAX_WAITING)

    def get(self, name: str, version: str) -> LoadedModel:
        """Give a version of a model, leased to the current call.

        Where the latest one cannot be loaded, the highest one that can takes its place until the storage changes.

        Raises:
            UserRuntimeException: there is no such version, or it cannot be loaded.
            Overloaded: it is not here, and too many wait for storages.
        """
        found = self._shelf.find(name, version)
        if found is not None:
            return found
        failed: dict[ModelKey, UserRuntimeException] = {}
        while True:
            key = self._shelf.resolve(name, version)
            if key is None:
                raise self._absent(name, version)
            if key in failed:
                raise failed[key]
            try:
                return self._load_in_turn(key)
            except UserRuntimeException as error:
                if version != LATEST:
                    raise
                failed[key] = error

    async def aget(self, name: str, version: str) -> LoadedModel:
        """Give a model as :meth:`get` does, without blocking.

        Raises:
            UserRuntimeException: as there.

        Cancellation: at once while it is loaded, which goes on; a model that is here is given without a checkpoint.
        """
        found = self._shelf.find(name, version)
        if found is not None:
            return found
        return await trio.to_thread.run_sync(self.get, name, version, abandon_on_cancel=True, limiter=self._limiter)

    def _absent(self, name: str, version: str) -> UserRuntimeException:
        if version == LATEST:
            return UserRuntimeException(f"no version of model {name} is left: all of them were removed")
        return UserRuntimeException(f"model {name} of version {version} wasn't found")

    def _load_in_turn(self, key: ModelKey) -> LoadedModel:
        version, copy = self._shelf.begin_load(key)
        try:
            # Whoever had the turn before may have loaded it.
            found = self._shelf.find(*key)
            if found is not None:
                return found
            if version is None:
                raise self._absent(*key)
            try:
                if copy is None or copy.fingerprint != version.fingerprint:
                    copy = self._fetch(key, version, copy)
                self._shelf.make_room(key)
                loaded = LoadedModel(copy, self._call_user(copy))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the border of user code
                return self._failed(key, version, error)
            self._shelf.put(loaded)
            return loaded
        finally:
            self._shelf.end_load(key, copy)
            self.empty_trash()

    def _fetch(self, key: ModelKey, version: VersionFiles, old: Copy | None) -> Copy:
        self._shelf.begin_fetch(key)
        try:
            self.empty_trash()
            copy = self._storage.fetch(key, version)
        finally:
            self._shelf.end_fetch(key)
        self._shelf.replace_copy(copy, old)
        log.debug("a model was fetched", model=key.name, version=key.version)
        return copy

    def _call_user(self, copy: Copy) -> Any:
        if self.load_model is None:
            raise UserRuntimeException("the handler has no method load_model, which models are loaded with")
        return self.load_model(str(copy.folder))

    def _failed(self, key: ModelKey, version: VersionFiles, error: BaseException) -> LoadedModel:
        is_unreachable = isinstance(error, StorageFailure | Overloaded)
        old, is_news = self._shelf.keep_old(key, version, is_unreachable=is_unreachable)
        if is_news:
            log.warning(
                "a model cannot be loaded",
                model=key.name,
                version=key.version,
                reason=f"{type(error).__name__}: {text_of(error)}",
                keeps_old=old is not None,
                exc_info=None if is_unreachable else error,
            )
        if old is not None:
            return old
        if isinstance(error, Overloaded):
            raise error
        message = f"failed (re-)loading model {key.name} of version {key.version}"
        raise UserRuntimeException(message, text_of(error)) from error

    def empty_trash(self) -> None:
        """Remove the files of copies that nobody needs any more."""
        for copy in self._shelf.take_trash():
            self._maker.remove(copy)
