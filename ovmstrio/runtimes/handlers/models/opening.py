"""From a project to the client that its handler gets, and to what ``/info`` tells."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import trio

from cortex_internal.lib.client.tensorflow import TensorFlowClient as TensorFlowClientBase
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec, ProjectBatching, ProjectSpec
from ovmstrio.runtimes.handlers.models.client import ModelClient, ModelNames, version_text
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.runtimes.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.runtimes.handlers.models.loader import ModelLoader
from ovmstrio.runtimes.handlers.models.predictions import Array, flat_list, read_inputs
from ovmstrio.runtimes.handlers.models.running import (
    BatchedRun,
    RunnableModel,
    load_saved_model,
    run_batch,
    run_model,
    submit,
)
from ovmstrio.runtimes.handlers.models.saved_model import SavedModel, choose_signature, read_saved_model
from ovmstrio.runtimes.handlers.models.shelf import Shelf
from ovmstrio.runtimes.handlers.models.sources import Copy, problem_of_saved_model
from ovmstrio.runtimes.handlers.models.tree import LATEST
from ovmstrio.runtimes.handlers.models.watching import WatchOptions
from ovmstrio.work.batching import Batcher, BatchOptions, open_batcher

__all__ = ["ProjectModels", "open_models"]


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
