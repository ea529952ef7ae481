"""Models of a handler project: storages, cache and clients."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Tensor
from ovmstrio.handlers.config.project_spec import ModelsSpec, ProjectBatching, ProjectSpec
from ovmstrio.handlers.cortex.clients import TensorFlowClient as TensorFlowClientBase
from ovmstrio.handlers.models.client import (
    Array,
    LoadModel,
    ModelClient,
    ModelLoader,
    ModelNames,
    StorageThreads,
    normalize_version,
    to_flat_list,
    to_input_arrays,
)
from ovmstrio.handlers.models.model_cache import ModelCache, StorageSync, Validate, WatchOptions, lease_models
from ovmstrio.handlers.models.saved_model import SavedModel, choose_signature, read_saved_model
from ovmstrio.handlers.models.storage import (
    Copy,
    CopyMaker,
    ModelSource,
    open_sources,
    saved_model_problem,
)
from ovmstrio.handlers.models.version_index import LATEST
from ovmstrio.serving.batching import Batcher, BatchOptions, open_batcher
from ovmstrio.serving.periodic_check import PeriodicCheck
from ovmstrio.stores.open_storage import OpenStorage, open_storage
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from ovmstrio.core.tracing import StartRootSpan
    from ovmstrio.handlers.models.saved_model_run import BatchedRun, RunnableModel


class ModelInfoSource(Protocol):
    """Source of the model metadata that ``/info`` returns."""

    def info(self) -> dict[str, Any]:
        """Return the metadata of all models; blocking."""
        ...


# Library


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """Options of a model library.

    Attributes:
        root: parent of the temporary folder for copies; the system's temporary folder if None.
        open_storage: opens the storage of a location; by default chosen by the URL scheme.
        start_root_span: starts spans of requests to storages outside of calls; None without tracing.
    """

    watch: WatchOptions = field(default_factory=WatchOptions)
    root: Path | None = None
    open_storage: OpenStorage | None = None
    start_root_span: StartRootSpan | None = None


class ModelLibrary:
    """Models of one project.

    Attributes:
        storage_threads: downloads for calls of a project with cached models.
        client: passed to the handler's constructor.
        sync: synchronizes the cache with the storages.
        watcher: runs ``sync`` periodically.
    """

    def __init__(
        self, spec: ModelsSpec, sources: Sequence[ModelSource], root: Path, *, validate: Validate, watch: WatchOptions
    ) -> None:
        self.copy_cleaner = _Janitor()
        self.cache = ModelCache(spec.cache_size, spec.disk_cache_size, self.copy_cleaner.wake)
        maker = CopyMaker(root, sources)
        self.storage_threads = StorageThreads(maker, watch.fetches, spec.storage_timeout_seconds)
        self.loader = ModelLoader(self.cache, maker, self.storage_threads)
        self.names = ModelNames(spec, self.cache)
        self.client = ModelClient(self.cache, self.loader, self.names, is_caching=spec.is_cached)
        self.sync = StorageSync(sources, self.cache, maker, spec=spec, validate=validate, options=watch)
        self.watcher = PeriodicCheck(self.sync.synchronize, watch.interval_seconds, Backoff())

    @property
    def is_stale(self) -> bool:
        """True if the last synchronization failed, so that models may be outdated."""
        return self.sync.is_stale


@asynccontextmanager
async def open_library(
    spec: ModelsSpec,
    *,
    load_model: LoadModel | None = None,
    validate: Validate = lambda _: None,
    options: LibraryOptions | None = None,
) -> AsyncIterator[ModelLibrary]:
    """Provide the models of a project during the block, after a first synchronization with the storages.

    ``load_model`` may be set later with ``client.set_load_method``; ``validate`` rejects unusable versions.

    Raises:
        ConfigError: the package of a storage is not installed.
    """
    options = options or LibraryOptions()
    sources = open_sources(
        spec,
        options.open_storage or partial(open_storage, stall_seconds=spec.storage_timeout_seconds),
        options.start_root_span,
    )
    with _new_folder(options.root) as root:
        async with trio.open_nursery() as nursery:
            library = ModelLibrary(spec, sources, root, validate=validate, watch=options.watch)
            library.loader.load_model = load_model
            nursery.start_soon(library.watcher.run)
            nursery.start_soon(library.copy_cleaner.run, library.loader)
            if spec.is_cached:
                nursery.start_soon(library.storage_threads.run)
            await library.sync.synced.wait()
            yield library
            nursery.cancel_scope.cancel()
        library.cache.replace_catalog({})
        for storage in {id(source.storage): source.storage for source in sources}.values():
            storage.close()


@contextmanager
def _new_folder(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="ovmstrio-models-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Janitor:
    def __init__(self) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        self._wakeup = trio.Event()

    def wake(self) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._set, idempotent=True)

    def _set(self) -> None:
        self._wakeup.set()

    async def run(self, loader: ModelLoader) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            await trio.to_thread.run_sync(loader.remove_unused_copies, abandon_on_cancel=True)


# Clients


class SavedModelLoader:
    """Loader of SavedModels from their folders; called in worker threads."""

    def __init__(self, spec: ModelsSpec) -> None:
        self._keys = {entry.name: entry.signature_key for entry in spec.entries}
        self._default = spec.signature_key
        self._loop = trio.lowlevel.current_trio_token()

    def __call__(self, folder: str) -> RunnableModel:
        """Load a model; raise ConfigError if the model fails to load, or its signature is missing or ambiguous."""
        from ovmstrio.handlers.models.saved_model_run import load_saved_model  # noqa: PLC0415 - imported when first needed

        return trio.from_thread.run(
            load_saved_model, Path(folder), self.signature_key(Path(folder)), trio_token=self._loop
        )

    def signature_key(self, folder: Path) -> str | None:
        """Return the configured signature key of the model in a folder; None if not configured."""
        return self._keys.get(folder.parts[-2], self._default)


class TensorFlowClient(TensorFlowClientBase):
    """Client that runs SavedModels for the handler's code; ``batcher`` is None without batching."""

    def __init__(
        self,
        loader: ModelLoader,
        names: ModelNames,
        batcher: Batcher[BatchedRun, list[Tensor]] | None = None,
    ) -> None:
        from ovmstrio.handlers.models.saved_model_run import run_batched, run_model  # noqa: PLC0415 - imported when first needed

        self._loader = loader
        self._names = names
        self._run = run_model if batcher is None else partial(run_batched, batcher)
        self._loop = trio.lowlevel.current_trio_token()

    def predict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = LATEST,
    ) -> dict[str, Any]:
        """Run a model and return each output as a flat list.

        Args:
            model_input: arrays or array-like values by input name of the signature.
            model_name: ignored if the project has one model given by its ``path``.
            model_version: a number; ``"latest"``, None or ``""`` for the highest version.

        Raises:
            UserRuntimeException: the model or version does not exist, or an input does not fit.
            ModelFailure: OpenVINO failed.
            RuntimeError: called on the event loop; use :meth:`apredict` there.
        """
        if trio.lowlevel.in_trio_run():
            raise RuntimeError("predict would block the event loop: use 'await client.apredict(...)' in async methods")
        version, name = normalize_version(model_version), self._names.check(model_name)
        with lease_models():
            model = cast("RunnableModel", self._loader.get(name, version).value)
            outputs = trio.from_thread.run(self._run, model, _inputs(model, model_input), trio_token=self._loop)
        return _named_outputs(model, outputs)

    async def apredict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = LATEST,
    ) -> dict[str, Any]:
        """Run a model as :meth:`predict` does, for ``async def`` handlers."""
        version, name = normalize_version(model_version), self._names.check(model_name)
        with lease_models():
            model = cast("RunnableModel", (await self._loader.get_async(name, version)).value)
            outputs = await self._run(model, _inputs(model, model_input))
        return _named_outputs(model, outputs)


def _inputs(model: RunnableModel, given: Mapping[str, Any]) -> dict[str, Array]:
    return to_input_arrays(given, model.servable.metadata.inputs, str(model), model.signature.inputs.keys())


def _named_outputs(model: RunnableModel, outputs: list[Tensor]) -> dict[str, Any]:
    found = {output.name: output for output in outputs}
    return {name: to_flat_list(found[theirs]) for name, theirs in model.outputs.items()}


class SavedModelInfo:
    """Descriptions of SavedModels for ``/info``, cached by copy."""

    def __init__(self, signature_key: Callable[[Path], str | None]) -> None:
        self._key_for = signature_key
        self._known: dict[Copy, dict[str, Any]] = {}

    def __call__(self, cache: ModelCache) -> dict[str, dict[str, Any]]:
        """Return the descriptions by ``name-version``, highest version of each model first."""
        catalog, copies = cache.catalog, cache.copies()
        self._known = {copy: self._known.get(copy) or self._describe(copy) for copy in copies.values()}
        ordered = [key for name in sorted({key.name for key in copies}) for key in cache.versions(name)]
        return {
            f"{key.name}-{key.version}": self._known[copies[key]] | {"timestamp": catalog[key].timestamp}
            for key in ordered
            if key in catalog and key in copies
        }

    def _describe(self, copy: Copy) -> dict[str, Any]:
        described: dict[str, Any] = {"disk_path": str(copy.folder)}
        try:
            saved = read_saved_model(copy.folder)
            key = choose_signature(saved.signatures, self._key_for(copy.folder))
        except ConfigError as error:
            return described | {"problem": str(error)}
        signatures = {name: signature.to_metadata() for name, signature in saved.signatures.items()}
        inputs = _input_signatures(saved, key)
        return described | {
            "signature_def": signatures,
            "signature_key": key,
            "input_signatures": inputs,
            "input_signature": inputs,
        }


def _input_signatures(saved: SavedModel, key: str) -> dict[str, Any]:
    return {
        name: {"shape": "unknown" if info.shape is None else list(info.shape), "type": info.type_name}
        for name, info in saved.signatures[key].inputs.items()
    }


MODEL_CLIENT: Final = "model_client"
TENSORFLOW_CLIENT: Final = "tensorflow_client"
_METADATA: Final = "model_metadata"
_STALE: Final = "stale"
_BATCHES_AT_ONCE: Final = 2
_ROOT_VARIABLE: Final = "CORTEX_MODEL_DIR"
"""Environment variable with the parent folder of model copies."""


class ProjectModels:
    """Models of a project, if any, and the clients by the constructor argument that requests them.

    ``saved_models`` describes models for ``/info``; None to return versions and timestamps.
    """

    def __init__(
        self,
        library: ModelLibrary | None = None,
        clients: Mapping[str, ModelClient | TensorFlowClient] | None = None,
        saved_models: SavedModelInfo | None = None,
    ) -> None:
        self.library = library
        self.clients = clients or {}
        self._saved_models = saved_models

    @property
    def is_stale(self) -> bool:
        """True if the last synchronization failed, so that models may be outdated."""
        return self.library is not None and self.library.is_stale

    def info(self) -> dict[str, Any]:
        """Return the models for ``/info``; blocking, since files of new versions are read.

        The key ``stale`` is present only while the storages cannot be read.
        """
        if self.library is None:
            return {}
        described = (
            self.library.cache.metadata() if self._saved_models is None else self._saved_models(self.library.cache)
        )
        return {_METADATA: described} | ({_STALE: True} if self.is_stale else {})


@asynccontextmanager
async def open_models(
    project: ProjectSpec, *, options: LibraryOptions | None = None, start_root_span: StartRootSpan | None = None
) -> AsyncIterator[ProjectModels]:
    """Provide the models of a project during the block, after a first synchronization with the storages.

    A Python handler's ``load_model`` is set later with the client's ``set_load_method``.

    Raises:
        ConfigError: the package of a storage is not installed.
    """
    spec = project.models
    if spec is not None and options is None:
        root = os.environ.get(_ROOT_VARIABLE)
        watch = WatchOptions(interval_seconds=spec.reload_interval_seconds)
        options = LibraryOptions(watch, Path(root) if root else None, start_root_span=start_root_span)
    if spec is None:
        yield ProjectModels()
    elif project.type == "python":
        async with open_library(spec, options=options) as library:
            yield ProjectModels(library, {MODEL_CLIENT: library.client})
    else:
        load_model = SavedModelLoader(spec)
        async with open_library(spec, load_model=load_model, validate=saved_model_problem, options=options) as library:
            info = None if spec.is_cached else SavedModelInfo(load_model.signature_key)
            async with _open_tensorflow(library, project.batching) as client:
                yield ProjectModels(library, {TENSORFLOW_CLIENT: client}, info)


@asynccontextmanager
async def _open_tensorflow(library: ModelLibrary, batching: ProjectBatching | None) -> AsyncIterator[TensorFlowClient]:
    from ovmstrio.handlers.models.saved_model_run import run_batch  # noqa: PLC0415 - imported when first needed

    if batching is None:
        yield TensorFlowClient(library.loader, library.names)
        return
    batches = BatchOptions(max_size=batching.max_batch_size, timeout_seconds=batching.interval_seconds)
    async with open_batcher(
        run_batch, batches, concurrency=_BATCHES_AT_ONCE, retry_singly=batching.retry_singly
    ) as batcher:
        yield TensorFlowClient(library.loader, library.names, batcher)
