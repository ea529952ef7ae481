"""Models of handlers: loading, at most once at a time for each version, and the client that handlers use."""

from __future__ import annotations

import base64
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import Overloaded, StorageFailure
from ovmstrio.core.tensor import BYTES, Tensor, TensorSpec
from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL, ModelsSpec
from ovmstrio.handlers.cortex.clients import ModelClient as ModelClientBase
from ovmstrio.handlers.cortex.exceptions import UserRuntimeException
from ovmstrio.handlers.models.model_cache import LoadedModel, ModelCache
from ovmstrio.handlers.models.storage import Copy, CopyMaker
from ovmstrio.handlers.models.version_index import LATEST, ModelKey, VersionFiles, is_version
from ovmstrio.isolation.thread_pool import release_place_while_waiting
from ovmstrio.util.truncation import text_of

# ----------------------------------------------------------------------
# Loader
# ----------------------------------------------------------------------

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

    def note_progress(self, _: int = 0) -> None:
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


# ----------------------------------------------------------------------
# Client
# ----------------------------------------------------------------------

_SHOWN: Final = 20


def normalize_version(version: str | int | None) -> str:
    """Normalize a version to a number or ``latest`` (None and ``""`` too); UserRuntimeException for others."""
    if version is None or version in {LATEST, ""}:
        return LATEST
    text = str(version)
    if isinstance(version, bool) or not is_version(text):
        raise UserRuntimeException(f"model version {version!r} is invalid", "expected a number, or 'latest'")
    return text


class ModelNames:
    """Model names of a project that handlers may request."""

    def __init__(self, spec: ModelsSpec, cache: ModelCache) -> None:
        self._has_one = spec.kind == "path"
        self._listed = frozenset(entry.name for entry in spec.entries)
        self._cache = cache

    @property
    def known(self) -> list[str]:
        """Sorted model names."""
        return sorted(self._listed or {key.name for key in self._cache.catalog})

    def check(self, name: str | None) -> str:
        """Return the name of the requested model.

        Raises:
            UserRuntimeException: no name is given and the project has several models, or the model does not exist.
        """
        if self._has_one:
            return DEFAULT_MODEL
        if name is not None and (name in self._listed or self._cache.versions(name)):
            return name
        known = self.known
        listing = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        what = "model_name was not specified" if name is None else f"model {name!r} was not found"
        raise UserRuntimeException(what, f"choose one of the following: {listing}")


class ModelClient(ModelClientBase):
    """Access to a project's models for the handler's code, from any thread and in its constructor.

    A returned model and its files stay unchanged until the current call of the handler ends.
    """

    def __init__(
        self,
        cache: ModelCache,
        loader: ModelLoader,
        names: ModelNames,
        *,
        is_caching: bool,
    ) -> None:
        self._cache = cache
        self._loader = loader
        self._names = names
        self._is_caching = is_caching

    def get_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Return the result of ``load_model`` for a version of a model; load it if necessary.

        Args:
            model_name: ignored if the project has one model given by its ``path``.
            model_version: a number; ``"latest"``, None or ``""`` for the highest version.

        Raises:
            UserRuntimeException: the model or version does not exist or fails to load.
        """
        version = LATEST if model_version is None or model_version == LATEST else normalize_version(model_version)
        name = self._names.check(model_name)
        return self._loader.get(name, version).value

    async def aget_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Return a model as :meth:`get_model` does, for ``async def`` handlers.

        Cancellation: at once; a started load continues.
        """
        await trio.lowlevel.checkpoint()
        version, name = normalize_version(model_version), self._names.check(model_name)
        return (await self._loader.get_async(name, version)).value

    def set_load_method(self, load_model: LoadModel) -> None:
        """Set the function that loads a model from its folder."""
        self._loader.load_model = load_model

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Models by name, each with ``versions`` (highest first) and ``timestamps``."""
        return self._cache.metadata()

    @property
    def caching(self) -> bool:
        """True if models are loaded and evicted by use."""
        return self._is_caching


# Model inputs and outputs

Array = np.ndarray[Any, Any]

_SPECIAL: Final = {math.inf: "Infinity", -math.inf: "-Infinity"}


def to_input_arrays(
    given: Any, inputs: Sequence[TensorSpec], model: str, unused: Collection[str] = ()
) -> dict[str, Array]:
    """Convert the handler's values to the input arrays of a model, in the order of the inputs.

    ``model`` is the name in messages; the values of inputs in ``unused`` are ignored.

    Raises UserRuntimeException if an input is missing or has the wrong type, datatype or shape.
    """
    if not isinstance(given, Mapping):
        raise UserRuntimeException(
            f"the input of {model} must be a dict of arrays by input name, got a {type(given).__name__}"
        )
    names = [spec.name for spec in inputs]
    unknown = [str(name) for name in given if name not in names and name not in unused]
    if unknown:
        raise UserRuntimeException(f"{model} has no input {unknown[0]!r}", f"its inputs are {', '.join(names)}")
    arrays: dict[str, Array] = {}
    for spec in inputs:
        if spec.name not in given:
            raise UserRuntimeException(f"missing key {spec.name!r} for {model}")
        arrays[spec.name] = _array(given[spec.name], spec, model)
    return arrays


def _array(value: Any, spec: TensorSpec, model: str) -> Array:
    try:
        found = np.asarray(value, dtype=object) if spec.datatype is BYTES else np.asarray(value)
        array = _strings(found) if spec.datatype is BYTES else _converted(found, spec.datatype.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise _mismatch(spec, model, str(error)) from error
    sizes = array.shape
    fits = len(sizes) == len(spec.shape) and all(dim.accepts(size) for dim, size in zip(spec.shape, sizes, strict=True))
    if not fits:
        raise _mismatch(spec, model, f"the shape is {_shown(sizes)}")
    return array


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise OverflowError(f"a value is out of the range of {dtype.name}")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"the values are {array.dtype.name}")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _strings(array: Array) -> Array:
    encoded = np.empty(array.size, dtype=object)
    encoded[:] = [_encoded(value) for value in array.flat]
    return encoded.reshape(array.shape)


def _encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"a value is a {type(value).__name__}")


def _mismatch(spec: TensorSpec, model: str, reason: str) -> UserRuntimeException:
    shape = "a scalar" if not spec.shape else f"shape {_shown(spec.reported_shape)}"
    return UserRuntimeException(
        f"input {spec.name!r} of {model} does not fit", f"expected {shape} of {spec.datatype.name}", reason
    )


def _shown(sizes: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def to_flat_list(tensor: Tensor) -> list[Any]:
    """Return the elements of an output as a flat list, as JSON of a protobuf message has them.

    64-bit integers are decimal strings, BYTES are base64, and FP16 and BF16 are their bits.
    """
    name = tensor.datatype.name
    convert = _TO_LIST.get(name)
    flat = tensor.array.reshape(-1)
    return flat.tolist() if convert is None else convert(flat)


def _decimal_strings(array: Array) -> list[Any]:
    return list(map(str, array.tolist()))


def _bits(array: Array) -> list[Any]:
    return list(array.view(np.uint16).tolist())


def _doubles(array: Array) -> list[Any]:
    values: list[Any] = array.tolist()
    if np.isfinite(array).all():
        return values
    return ["NaN" if math.isnan(value) else _SPECIAL.get(value, value) for value in values]


def _floats(array: Array) -> list[Any]:
    """Return the shortest decimal numbers for these floats: 0.1, not 0.10000000149011612."""
    return _doubles(array.astype("U").astype(np.float64))


_TO_LIST: Final[Mapping[str, Callable[[Array], list[Any]]]] = {
    "INT64": _decimal_strings,
    "UINT64": _decimal_strings,
    "BYTES": lambda array: [base64.b64encode(value).decode() for value in array],
    "FP16": _bits,
    "BF16": _bits,
    "FP32": _floats,
    "FP64": _doubles,
}
