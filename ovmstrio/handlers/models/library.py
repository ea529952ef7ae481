"""The models of a project as those need them who load its handler, without what only models need."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

import trio

from cortex_internal.lib.client.tensorflow import TensorFlowClient as TensorFlowClientBase
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Tensor
from ovmstrio.handlers.config.project_spec import ModelsSpec, ProjectBatching, ProjectSpec
from ovmstrio.handlers.models.client import Array, ModelClient, ModelNames, flat_list, read_inputs, version_text
from ovmstrio.handlers.models.loader import LoadModel, ModelLoader, StorageThreads
from ovmstrio.handlers.models.model_cache import Shelf, StorageSync, Validate, WatchOptions, lease_models
from ovmstrio.handlers.models.saved_model import (
    BatchedRun,
    RunnableModel,
    SavedModel,
    choose_signature,
    load_saved_model,
    read_saved_model,
    run_batch,
    run_model,
    submit,
)
from ovmstrio.handlers.models.storage import (
    Copy,
    CopyMaker,
    ModelSource,
    OpenStorage,
    open_sources,
    open_storage,
    problem_of_saved_model,
)
from ovmstrio.handlers.models.version_index import LATEST
from ovmstrio.serving.batching import Batcher, BatchOptions, open_batcher
from ovmstrio.serving.file_watcher import FileWatcher
from ovmstrio.util.backoff import Backoff

__all__ = [
    "LibraryOptions",
    "ModelLibrary",
    "Models",
    "ModelsInfo",
    "ProjectModels",
    "open_clients",
    "open_library",
    "open_models",
]

# ----------------------------------------------------------------------
# The models of a project as those need them who load its handler, without what only models need
# ----------------------------------------------------------------------


class ModelsInfo(Protocol):
    """What is told of the models of a project."""

    def info(self) -> dict[str, Any]:
        """Tell of all models, as ``/info`` does; blocking."""
        ...


class Models(ModelsInfo, Protocol):
    """The models of a project, as its server needs them."""

    @property
    def clients(self) -> Mapping[str, Any]:
        """What the handler's constructor may ask for, by name."""
        ...


class _NoModels:
    clients: Mapping[str, Any] = {}

    def info(self) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def open_clients(project: ProjectSpec) -> AsyncIterator[Models]:
    """Keep a project's models while the block lasts; it is entered after the first look at their storages.

    Raises:
        ConfigError: a storage cannot be used.
        ExceptionGroup: of what the block raises.

    Ownership: the tasks that follow the storages, and the copies of models.
    Cancellation: at any checkpoint.
    """
    if project.models is None:
        yield _NoModels()
        return
    # OpenVINO and the libraries of storages are left alone by those who have no models.

    async with open_models(project) as models:
        yield models


# ----------------------------------------------------------------------
# All models of one project, kept as their storages are while a block lasts
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """How models are kept.

    Attributes:
        watch: how their storages are followed.
        root: where copies are kept, in a new folder that is removed at the end; the system's temporary folder if None.
        open_storage: opens storages; None for those that a URL stands for.
    """

    watch: WatchOptions = field(default_factory=WatchOptions)
    root: Path | None = None
    open_storage: OpenStorage | None = None


class ModelLibrary:
    """The models of one project.

    Args:
        spec: which models.
        sources: where they come from.
        root: where copies of them are kept.
        validate: which versions can be used at all.
        watch: how the storages are followed.

    Attributes:
        shelf: what is here.
        storage_threads: fetch for those who ask.
        loader: gives that, and loads what is not.
        names: the names that may be asked for.
        client: for the handler.
        sync: takes over what the storages have.
        watcher: has it do so again and again.
        janitor: removes copies that are not needed any more.
    """

    def __init__(
        self, spec: ModelsSpec, sources: Sequence[ModelSource], root: Path, *, validate: Validate, watch: WatchOptions
    ) -> None:
        self.janitor = _Janitor()
        self.shelf = Shelf(spec.cache_size, spec.disk_cache_size, self.janitor.wake)
        maker = CopyMaker(root, sources)
        self.storage_threads = StorageThreads(maker, watch.fetches, spec.storage_timeout_seconds)
        self.loader = ModelLoader(self.shelf, maker, self.storage_threads)
        self.names = ModelNames(spec, self.shelf)
        self.client = ModelClient(self.shelf, self.loader, self.names, is_caching=spec.is_cached)
        self.sync = StorageSync(sources, self.shelf, maker, spec=spec, validate=validate, options=watch)
        self.watcher = FileWatcher(self.sync.look, watch.interval_seconds, Backoff())

    @property
    def is_stale(self) -> bool:
        """Whether the storages could not be read lately, so that models may be older than they should."""
        return self.sync.is_stale


@asynccontextmanager
async def open_library(
    spec: ModelsSpec,
    *,
    load_model: LoadModel | None = None,
    validate: Validate = lambda _: None,
    options: LibraryOptions | None = None,
) -> AsyncIterator[ModelLibrary]:
    """Keep the models of a project while the block lasts; it is entered after the first look at all storages.

    Args:
        spec: which models.
        load_model: how they are loaded; may be said later, with ``client.set_load_method``.
        validate: which versions can be used at all.
        options: how they are kept.

    Raises:
        ConfigError: a storage's library is not installed.
        ExceptionGroup: of what the block raises.

    Ownership: the task that follows the storages, and the copies of models on the local disk.

    Cancellation: at any checkpoint; the copies are removed.
    """
    options = options or LibraryOptions()
    sources = open_sources(
        spec, options.open_storage or partial(open_storage, stall_seconds=spec.storage_timeout_seconds)
    )
    with _new_folder(options.root) as root:
        async with trio.open_nursery() as nursery:
            library = ModelLibrary(spec, sources, root, validate=validate, watch=options.watch)
            library.loader.load_model = load_model
            nursery.start_soon(library.watcher.run)
            nursery.start_soon(library.janitor.run, library.loader)
            if spec.is_cached:
                nursery.start_soon(library.storage_threads.run)
            await library.sync.synced.wait()
            yield library
            nursery.cancel_scope.cancel()
        library.shelf.replace_catalog({})
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
    """Removes copies that nobody needs any more, soon after somebody has found them so."""

    def __init__(self) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        self._wanted = trio.Event()

    def wake(self) -> None:
        """Say that there is something to remove; from any thread."""
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._set, idempotent=True)

    def _set(self) -> None:
        self._wanted.set()

    async def run(self, loader: ModelLoader) -> None:
        """Remove copies until cancelled.

        Cancellation: at once; a thread that removes goes on.
        """
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await trio.to_thread.run_sync(loader.empty_trash, abandon_on_cancel=True)


# ----------------------------------------------------------------------
# From a project to the client that its handler gets, and to what ``/info`` tells
# ----------------------------------------------------------------------


class SavedModelLoader:
    """Loads SavedModels out of their folders; called in worker threads.

    Args:
        spec: says which signatures count.
    """

    def __init__(self, spec: ModelsSpec) -> None:
        self._keys = {entry.name: entry.signature_key for entry in spec.entries}
        self._default = spec.signature_key
        self._loop = trio.lowlevel.current_trio_token()

    def __call__(self, folder: str) -> RunnableModel:
        """Load a model.

        Raises:
            ConfigError: it cannot be loaded, or has no signature that could be meant.
        """
        return trio.from_thread.run(load_saved_model, Path(folder), self.key_for(Path(folder)), trio_token=self._loop)

    def key_for(self, folder: Path) -> str | None:
        """Tell which signature is wanted of a model in a folder, if one is."""
        return self._keys.get(folder.parts[-2], self._default)


class TensorFlowClient(TensorFlowClientBase):
    """Runs SavedModels for the handler's code, in its constructor too.

    Args:
        loader: gives models.
        names: the names that may be asked for.
        batcher: joins the inputs of several calls, if that is configured.
    """

    def __init__(
        self,
        loader: ModelLoader,
        names: ModelNames,
        batcher: Batcher[BatchedRun, list[Tensor]] | None = None,
    ) -> None:
        self._loader = loader
        self._names = names
        self._run = run_model if batcher is None else partial(submit, batcher)
        self._loop = trio.lowlevel.current_trio_token()

    def predict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = LATEST,
    ) -> dict[str, Any]:
        """Run a model, and give each of its outputs as a flat list.

        Args:
            model_input: arrays, or what can be made into them, by the names of the signature's inputs.
            model_name: of the model; not needed, and not looked at, where there is one only by its ``path``.
            model_version: a number, or the highest one for ``"latest"``, None and nothing.

        Raises:
            UserRuntimeException: there is no such model or version, or an input does not fit.
            ModelFailure: OpenVINO failed on the inputs.
            RuntimeError: it is called on the event loop, where :meth:`apredict` is to be used.
        """
        if trio.lowlevel.in_trio_run():
            raise RuntimeError("predict would block the event loop: use 'await client.apredict(...)' in async methods")
        version, name = version_text(model_version), self._names.check(model_name)
        with lease_models():
            model = cast("RunnableModel", self._loader.get(name, version).value)
            outputs = trio.from_thread.run(self._run, model, _inputs(model, model_input), trio_token=self._loop)
        return _answer(model, outputs)

    async def apredict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = LATEST,
    ) -> dict[str, Any]:
        """Run a model as :meth:`predict` does, for handlers whose methods are ``async def``.

        Raises:
            Exception: as there.

        Cancellation: at once; a run that nobody else waits for is stopped.
        """
        version, name = version_text(model_version), self._names.check(model_name)
        with lease_models():
            model = cast("RunnableModel", (await self._loader.aget(name, version)).value)
            outputs = await self._run(model, _inputs(model, model_input))
        return _answer(model, outputs)


def _inputs(model: RunnableModel, given: Mapping[str, Any]) -> dict[str, Array]:
    return read_inputs(given, model.servable.metadata.inputs, str(model), model.signature.inputs.keys())


def _answer(model: RunnableModel, outputs: list[Tensor]) -> dict[str, Any]:
    found = {output.name: output for output in outputs}
    return {name: flat_list(found[theirs]) for name, theirs in model.outputs.items()}


class SavedModelInfo:
    """Describes SavedModels; reads the file of each of their copies once.

    Args:
        key_for: tells which signature is wanted of a model in a folder, if one is.
    """

    def __init__(self, key_for: Callable[[Path], str | None]) -> None:
        self._key_for = key_for
        self._known: dict[Copy, dict[str, Any]] = {}

    def __call__(self, shelf: Shelf) -> dict[str, dict[str, Any]]:
        """Describe all that there are, by name and version, the highest version of a model first."""
        catalog, copies = shelf.catalog, shelf.copies()
        self._known = {copy: self._known.get(copy) or self._describe(copy) for copy in copies.values()}
        ordered = [key for name in sorted({key.name for key in copies}) for key in shelf.versions(name)]
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
        signatures = {name: signature.described() for name, signature in saved.signatures.items()}
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
"""Names the folder for copies of models."""


class ProjectModels:
    """The models of a project.

    Args:
        library: keeps them; None where the project has none.
        clients: what the handler's constructor may ask for, by name.
        saved_models: describes each of them by its signatures, where that is how ``/info`` tells of them.
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
        """Whether the storages could not be read lately, so that models may be older than they should."""
        return self.library is not None and self.library.is_stale

    def info(self) -> dict[str, Any]:
        """Tell of all models, as ``/info`` does; ``stale`` is there only while their storages cannot be read.

        May read files of models that it was not asked about before, so it belongs in a thread.
        """
        if self.library is None:
            return {}
        described = (
            self.library.shelf.metadata() if self._saved_models is None else self._saved_models(self.library.shelf)
        )
        return {_METADATA: described} | ({_STALE: True} if self.is_stale else {})


@asynccontextmanager
async def open_models(project: ProjectSpec, *, options: LibraryOptions | None = None) -> AsyncIterator[ProjectModels]:
    """Keep the models of a project while the block lasts; it is entered when its handler may be made.

    A Python handler's ``load_model`` is said later, with the client's ``set_load_method``.

    Args:
        project: whose models.
        options: how they are kept; as the project says if None.

    Raises:
        ConfigError: a storage's library is not installed.
        ExceptionGroup: of what the block raises.

    Ownership: as :func:`open_library`, and the batches of SavedModels.

    Cancellation: at any checkpoint.
    """
    spec = project.models
    if spec is not None and options is None:
        options = _options(spec)
    if spec is None:
        yield ProjectModels()
    elif project.type == "python":
        async with open_library(spec, options=options) as library:
            yield ProjectModels(library, {MODEL_CLIENT: library.client})
    else:
        load_model = SavedModelLoader(spec)
        async with open_library(
            spec, load_model=load_model, validate=problem_of_saved_model, options=options
        ) as library:
            info = None if spec.is_cached else SavedModelInfo(load_model.key_for)
            async with _open_tensorflow(library, project.batching) as client:
                yield ProjectModels(library, {TENSORFLOW_CLIENT: client}, info)


def _options(spec: ModelsSpec) -> LibraryOptions:
    root = os.environ.get(_ROOT_VARIABLE)
    watch = WatchOptions(interval_seconds=spec.reload_interval_seconds)
    return LibraryOptions(watch, Path(root) if root else None)


@asynccontextmanager
async def _open_tensorflow(library: ModelLibrary, batching: ProjectBatching | None) -> AsyncIterator[TensorFlowClient]:
    if batching is None:
        yield TensorFlowClient(library.loader, library.names)
        return
    batches = BatchOptions(max_size=batching.max_batch_size, timeout_seconds=batching.interval_seconds)
    async with open_batcher(
        run_batch, batches, concurrency=_BATCHES_AT_ONCE, retry_singly=batching.retry_singly
    ) as batcher:
        yield TensorFlowClient(library.loader, library.names, batcher)
