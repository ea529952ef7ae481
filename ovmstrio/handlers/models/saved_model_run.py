"""Running of TensorFlow SavedModels on OpenVINO."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.service import Servable
from ovmstrio.core.tensor import BYTES, RawTensor, Tensor
from ovmstrio.handlers.cortex.exceptions import UserRuntimeException
from ovmstrio.handlers.models.client import Array
from ovmstrio.handlers.models.saved_model import GRAPH_FILE, SavedModelSignature, choose_signature, read_saved_model
from ovmstrio.inference.crash_probe import crash_probe_of_user_code
from ovmstrio.models.loading import load_model
from ovmstrio.serving.batching import Batcher

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRECISE: Final = {"EXECUTION_MODE_HINT": "ACCURACY"}
"""Keeps float32 computations, as TensorFlow Serving does; some processors would use bfloat16."""


_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class RunnableModel:
    """Loaded SavedModel with one of its signatures; compared by identity.

    Attributes:
        key: key of the signature.
        outputs: output names of the servable by output names of the signature.
    """

    name: str
    version: str
    servable: Servable
    key: str
    signature: SavedModelSignature
    outputs: Mapping[str, str]

    def __str__(self) -> str:
        return f"model {self.name} of version {self.version}"


async def load_saved_model(folder: Path, signature_key: str | None) -> RunnableModel:
    """Load a SavedModel from a folder ``<name>/<version>``.

    Raises ConfigError if the model fails to load, or has no such signature. Cancellation drops the result of the load.
    """
    name, version, probe = *folder.parts[-2:], crash_probe_of_user_code()
    saved = await trio.to_thread.run_sync(read_saved_model, folder, abandon_on_cancel=True)
    key = choose_signature(saved.signatures, signature_key)
    # The version number of the servable is not used.
    spec = ModelSpec(name=name, base_path=folder.parent, plugin_config=_PRECISE)
    if saved.keys_in_file == {key}:
        servable = await load_model(spec, 1, folder, probe=probe)
    else:
        # OpenVINO would merge all signatures, or choose one itself.
        with _with_graph_file(folder, saved.with_only(key)) as chosen:
            servable = await load_model(spec, 1, chosen, probe=probe)
    signature = saved.signatures[key]
    outputs = _names_of_outputs(signature, [spec.name for spec in servable.metadata.outputs])
    return RunnableModel(name, version, servable, key, signature, outputs)


def _names_of_outputs(signature: SavedModelSignature, found: Sequence[str]) -> dict[str, str]:
    """Map output names of a signature to OpenVINO's, which has one name for each tensor, even an input's."""
    names = {name: name for name in signature.outputs if name in found}
    by_tensor = {signature.outputs[name].tensor: name for name in names}
    for name, info in signature.outputs.items():
        if info.tensor in by_tensor:
            names.setdefault(name, by_tensor[info.tensor])
    missing = [name for name in signature.outputs if name not in names]
    nameless = [name for name in found if name not in signature.outputs]
    if len(missing) == len(nameless) == 1:
        return names | {missing[0]: nameless[0]}
    # Ambiguous: OpenVINO's names are better than wrong names.
    return names | {name: name for name in nameless}


async def run_model(model: RunnableModel, arrays: Mapping[str, Array]) -> list[Tensor]:
    """Run a model on validated inputs; raise ModelFailure if OpenVINO failed."""
    request = InferRequest(model.name, model.version)
    for spec in model.servable.metadata.inputs:
        array = arrays[spec.name]
        request.inputs.append(InferInput(spec.name, spec.datatype.name, array.shape))
        request.raw_inputs.append(
            _length_prefixed(array) if spec.datatype is BYTES else array.reshape(-1).view(np.uint8).data
        )
    response = await model.servable.infer(request)
    # Only user code returns raw tensors.
    return [output for output in response.outputs if not isinstance(output, RawTensor)]


@dataclass(frozen=True, slots=True, eq=False)
class BatchedRun:
    """Inputs of one call; ``size`` is its number of rows."""

    model: RunnableModel
    arrays: Mapping[str, Array]
    size: int


async def run_batched(
    batcher: Batcher[BatchedRun, list[Tensor]], model: RunnableModel, arrays: Mapping[str, Array]
) -> list[Tensor]:
    """Run a model in a batch with other calls whose inputs have the same shapes except for the first dimension.

    Raises UserRuntimeException if an input or output has no first dimension.
    """
    sizes = {array.shape[0] if array.ndim else None for array in arrays.values()}
    if None in sizes:
        raise UserRuntimeException("Batching session Run() input tensors must have at least one dimension.")
    if len(sizes) != 1:
        raise UserRuntimeException("Batching session Run() input tensors must have equal 0th-dimension size.")
    (size,) = sizes
    if not size:
        return await run_model(model, arrays)
    key = (model, tuple(array.shape[1:] for array in arrays.values()))
    return await batcher.submit(BatchedRun(model, arrays, size), key=key, size=size)


async def run_batch(runs: Sequence[BatchedRun]) -> list[list[Tensor] | Exception]:
    """Run one batch and split the outputs among the calls.

    Raises UserRuntimeException if an output cannot be split, and ModelFailure if OpenVINO failed.
    """
    model = runs[0].model
    if len(runs) == 1:
        outputs = await run_model(model, runs[0].arrays)
        _check_outputs(outputs, runs[0].size)
        return [outputs]
    joined = {name: np.concatenate([run.arrays[name] for run in runs]) for name in runs[0].arrays}
    outputs = await run_model(model, joined)
    total = sum(run.size for run in runs)
    _check_outputs(outputs, total)
    divided: list[list[Tensor] | Exception] = []
    begin = 0
    for run in runs:
        part = slice(begin, begin + run.size)
        divided.append([Tensor(output.name, output.datatype, output.array[part]) for output in outputs])
        begin = part.stop
    return divided


def _check_outputs(outputs: Sequence[Tensor], size: int) -> None:
    for output in outputs:
        if not output.shape:
            raise UserRuntimeException("Batched output tensor has 0 dimensions.", f"output {output.name!r}")
        if output.shape[0] != size:
            raise UserRuntimeException(
                "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the inputs",
                f"{output.name!r} has {output.shape[0]} of {size}",
            )


@contextmanager
def _with_graph_file(folder: Path, content: bytes) -> Iterator[Path]:
    """Provide a copy of a folder, made of links, with another graph file."""
    with tempfile.TemporaryDirectory(prefix="ovmstrio-signature-", ignore_cleanup_errors=True) as made:
        for path in folder.iterdir():
            if path.name != GRAPH_FILE:
                (Path(made) / path.name).symlink_to(path)
        (Path(made) / GRAPH_FILE).write_bytes(content)
        yield Path(made)


def _length_prefixed(array: Array) -> bytes:
    return b"".join(_LENGTH.pack(len(value)) + value for value in array.flat)
