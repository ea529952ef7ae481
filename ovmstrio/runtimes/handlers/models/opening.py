"""From a project to the client that its handler gets, and to what ``/info`` tells."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec, ProjectBatching, ProjectSpec
from ovmstrio.runtimes.handlers.models.client import ModelClient
from ovmstrio.runtimes.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.runtimes.handlers.models.running import run_batch
from ovmstrio.runtimes.handlers.models.saved_model_info import SavedModelInfo
from ovmstrio.runtimes.handlers.models.sources import problem_of_saved_model
from ovmstrio.runtimes.handlers.models.tensorflow import SavedModelLoader, TensorFlowClient
from ovmstrio.runtimes.handlers.models.watching import WatchOptions
from ovmstrio.work.batching import BatchOptions, open_batcher

__all__ = ["ProjectModels", "open_models"]

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
