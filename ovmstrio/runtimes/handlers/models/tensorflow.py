"""What a handler's constructor gets as ``tensorflow_client``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from cortex_internal.lib.client.tensorflow import TensorFlowClient as TensorFlowClientBase
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.client import ModelNames, version_text
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.runtimes.handlers.models.loader import ModelLoader
from ovmstrio.runtimes.handlers.models.predictions import Array, flat_list, read_inputs
from ovmstrio.runtimes.handlers.models.running import BatchedRun, RunnableModel, load_saved_model, run_model, submit
from ovmstrio.runtimes.handlers.models.tree import LATEST
from ovmstrio.work.batching import Batcher

__all__ = ["SavedModelLoader", "TensorFlowClient"]


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
