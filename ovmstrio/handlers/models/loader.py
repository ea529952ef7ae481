"""Loading of handler models: downloads in storage threads, and at most one concurrent load of each version."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import structlog
import trio

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import Overloaded, StorageFailure
from ovmstrio.handlers.models.model_cache import LoadedModel, ModelCache
from ovmstrio.handlers.models.storage import Copy, CopyMaker
from ovmstrio.handlers.models.version_index import LATEST, ModelKey, VersionFiles
from ovmstrio.isolation.thread_pool import release_place_while_waiting
from ovmstrio.util.truncation import text_of

MAX_WAITING: Final = 64
"""Maximum number of calls that wait for storages; each occupies a thread."""


class _Fetch:
    __slots__ = ("context", "future", "is_begun", "key", "moved", "version")

    def __init__(self, key: ModelKey, version: VersionFiles) -> None:
        self.key = key
        self.version = version
        # Storage requests belong to the trace of the first caller.
        self.context = copy_context()
        self.future: Future[Copy] = Future()
        self.is_begun = False
        self.moved = time.monotonic()

    def note_progress(self) -> None:
        self.moved = time.monotonic()


class StorageThreads:
    """Threads that download model versions for blocking callers, including callers on the event loop's thread.

    A download fails if its storage sends nothing for ``stall_seconds``.
    """

    def __init__(self, maker: CopyMaker, count: int, stall_seconds: float) -> None:
        self._maker = maker
        self._count = count
        self._stall_seconds = stall_seconds
        self._queue: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._open: set[_Fetch] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self) -> None:
        """Run the threads until cancelled.

        Cancellation: at once; waiting callers fail, and a thread that its storage blocks is abandoned.
        """
        limiter = trio.CapacityLimiter(math.inf)
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self._count):
                    nursery.start_soon(
                        partial(trio.to_thread.run_sync, self._work, abandon_on_cancel=True, limiter=limiter)
                    )
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            for fetch in self._open:
                _settle(fetch, StorageFailure("the model storage is closing"))
        for _ in range(self._count):
            self._queue.put(None)

    def fetch(self, key: ModelKey, version: VersionFiles) -> Copy:
        """Download a version and return its copy; release the thread-pool slot of the caller meanwhile.

        Raises:
            StorageFailure: the version cannot be read or stored, or nothing was received for ``stall_seconds``.
            Overloaded: too many calls wait.
        """
        fetch = _Fetch(key, version)
        with self._lock:
            if self._is_closed:
                raise StorageFailure("the model storage is closing")
            if len(self._open) >= MAX_WAITING:
                raise Overloaded(f"{key} cannot be downloaded: {MAX_WAITING} calls already wait for model downloads")
            self._open.add(fetch)
        try:
            self._queue.put(fetch)
            with release_place_while_waiting():
                return self._wait(fetch)
        finally:
            with self._lock:
                self._open.discard(fetch)

    def _wait(self, fetch: _Fetch) -> Copy:
        while True:
            seconds = self._moved(fetch) + self._stall_seconds - time.monotonic()
            try:
                return fetch.future.result(max(seconds, 0))
            except TimeoutError:
                if fetch.future.done() or self._moved(fetch) + self._stall_seconds > time.monotonic():
                    continue
                what = "no data from its storage" if fetch.is_begun else "all storage threads stalled"
                _settle(fetch, StorageFailure(f"{fetch.key}: {what} for {self._stall_seconds:g} s"))

    def _moved(self, fetch: _Fetch) -> float:
        """Return the time of the last progress; of any download while this one waits for a thread."""
        if fetch.is_begun:
            return fetch.moved
        with self._lock:
            return max([fetch.moved, *(each.moved for each in self._open if each.is_begun)])

    # In the threads

    def _work(self) -> None:
        while (fetch := self._queue.get()) is not None:
            if not fetch.future.done():
                self._make(fetch)
            del fetch

    def _make(self, fetch: _Fetch) -> None:
        fetch.note_progress()
        fetch.is_begun = True
        try:
            copy = fetch.context.run(self._maker.make, fetch.key, fetch.version, fetch.note_progress)
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            _settle(fetch, error)
            return
        if not _settle(fetch, copy):
            self._maker.remove(copy)


def _settle(fetch: _Fetch, outcome: Copy | BaseException) -> bool:
    """Set the outcome of a fetch; return False if it has one."""
    try:
        if isinstance(outcome, BaseException):
            fetch.future.set_exception(outcome)
        else:
            fetch.future.set_result(outcome)
    except InvalidStateError:
        return False
    return True


# Model loader

log = structlog.get_logger(__name__)

LoadModel = Callable[[str], Any]
"""Loads a model from its folder."""


class ModelLoader:
    """Blocking access to models, from any thread.

    During a download, calls use the old copy if it is in memory; calls for the latest version use the latest local one.

    Attributes:
        load_model: the handler's method that loads a model from its folder.
    """

    def __init__(self, cache: ModelCache, maker: CopyMaker, storage: StorageThreads) -> None:
        self.load_model: LoadModel | None = None
        self._cache = cache
        self._maker = maker
        self._storage = storage
        self._limiter = trio.CapacityLimiter(2 * MAX_WAITING)

    def get(self, name: str, version: str) -> LoadedModel:
        """Return a version of a model, leased to the current call.

        If the latest version fails to load, the highest version that loads replaces it until the storage changes.

        Raises:
            UserRuntimeException: the version does not exist or fails to load.
            Overloaded: the version is not local, and too many calls wait for storages.
        """
        found = self._cache.find(name, version)
        if found is not None:
            return found
        failed: dict[ModelKey, UserRuntimeException] = {}
        while True:
            key = self._cache.resolve(name, version)
            if key is None:
                raise self._not_found(name, version)
            if key in failed:
                raise failed[key]
            try:
                return self._load_exclusively(key)
            except UserRuntimeException as error:
                if version != LATEST:
                    raise
                failed[key] = error

    async def get_async(self, name: str, version: str) -> LoadedModel:
        """Return a model as :meth:`get` does, without blocking.

        Cancellation: at once; a started load continues. No checkpoint if the model is in memory.
        """
        found = self._cache.find(name, version)
        if found is not None:
            return found
        return await trio.to_thread.run_sync(self.get, name, version, abandon_on_cancel=True, limiter=self._limiter)

    def _not_found(self, name: str, version: str) -> UserRuntimeException:
        if version == LATEST:
            return UserRuntimeException(f"no version of model {name} is left: all were removed")
        return UserRuntimeException(f"model {name} of version {version} wasn't found")

    def _load_exclusively(self, key: ModelKey) -> LoadedModel:
        version, copy = self._cache.lock_for_load(key)
        try:
            # The previous holder of the lock may have loaded the model.
            found = self._cache.find(*key)
            if found is not None:
                return found
            if version is None:
                raise self._not_found(*key)
            try:
                if copy is None or copy.fingerprint != version.fingerprint:
                    copy = self._fetch(key, version, copy)
                self._cache.reserve_memory(key)
                loaded = LoadedModel(copy, self._call_load_model(copy))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the border of user code
                return self._handle_failure(key, version, error)
            self._cache.put(loaded)
            return loaded
        finally:
            self._cache.unlock_after_load(key, copy)
            self.remove_unused_copies()

    def _fetch(self, key: ModelKey, version: VersionFiles, old: Copy | None) -> Copy:
        self._cache.start_download(key)
        try:
            self.remove_unused_copies()
            copy = self._storage.fetch(key, version)
        finally:
            self._cache.finish_download(key)
        self._cache.replace_copy(copy, old)
        log.debug("model version downloaded", model=key.name, version=key.version)
        return copy

    def _call_load_model(self, copy: Copy) -> Any:
        if self.load_model is None:
            raise UserRuntimeException("the handler has no method load_model")
        return self.load_model(str(copy.folder))

    def _handle_failure(self, key: ModelKey, version: VersionFiles, error: BaseException) -> LoadedModel:
        is_unreachable = isinstance(error, StorageFailure | Overloaded)
        old, is_news = self._cache.record_failure(key, version, is_unreachable=is_unreachable)
        if is_news:
            log.warning(
                "model load failed",
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

    def remove_unused_copies(self) -> None:
        """Remove the files of copies that are no longer needed."""
        for copy in self._cache.take_unused_copies():
            self._maker.remove(copy)
