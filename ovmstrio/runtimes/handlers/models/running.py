"""SavedModels that run in this process, alone or several callers' inputs at once."""

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

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.servable import Servable
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.runtimes.handlers.models.predictions import Array
from ovmstrio.runtimes.handlers.models.saved_model import SavedModelSignature, choose_signature, read_saved_model
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.work.batching import Batcher

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BatchedRun", "RunnableModel", "load_saved_model", "run_batch", "run_model", "submit"]

_GRAPH: Final = "saved_model.pb"
_PRECISE: Final = {"EXECUTION_MODE_HINT": "ACCURACY"}
"""Floats stay floats, as they would in TensorFlow Serving; some processors are faster with half of their digits."""
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class RunnableModel:
    """A SavedModel with one of its signatures; equal to itself alone.

    Attributes:
        name: of the model.
        version: of the model.
        servable: what runs.
        key: of the signature.
        signature: what the file says of it.
        outputs: what the servable calls the outputs, by their names in the signature.
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
    """Load a SavedModel out of a folder that is called ``<name>/<version>``.

    Raises:
        ConfigError: it cannot be loaded, or has no such signature.

    Cancellation: at once; the load goes on in its thread and its result is dropped.
    """
    name, version = folder.parts[-2:]
    saved = await trio.to_thread.run_sync(read_saved_model, folder, abandon_on_cancel=True)
    key = choose_signature(saved.signatures, signature_key)
    # A servable has one version; which one of the handler's model this is does not matter to it.
    spec = ModelSpec(name=name, base_path=folder.parent, plugin_config=_PRECISE)
    if saved.keys_in_file == {key}:
        servable = await load_model(spec, 1, folder)
    else:
        # OpenVINO takes the inputs and outputs of all signatures, or of one whose key cannot be said to it.
        with _beside(folder, saved.with_only(key)) as chosen:
            servable = await load_model(spec, 1, chosen)
    signature = saved.signatures[key]
    outputs = _names_of_outputs(signature, [spec.name for spec in servable.metadata.outputs])
    return RunnableModel(name, version, servable, key, signature, outputs)


def _names_of_outputs(signature: SavedModelSignature, found: Sequence[str]) -> dict[str, str]:
    """Find the outputs of a signature among OpenVINO's, where a tensor has one name alone, be it an input's."""
    names = {name: name for name in signature.outputs if name in found}
    by_tensor = {signature.outputs[name].tensor: name for name in names}
    for name, info in signature.outputs.items():
        if info.tensor in by_tensor:
            names.setdefault(name, by_tensor[info.tensor])
    missing = [name for name in signature.outputs if name not in names]
    nameless = [name for name in found if name not in signature.outputs]
    if len(missing) == len(nameless) == 1:
        return names | {missing[0]: nameless[0]}
    # Which is which cannot be told, and a wrong name would be worse than OpenVINO's.
    return names | {name: name for name in nameless}


@contextmanager
def _beside(folder: Path, content: bytes) -> Iterator[Path]:
    """Give a folder with another graph file, and links to everything else."""
    with tempfile.TemporaryDirectory(prefix="ovmstrio-signature-", ignore_cleanup_errors=True) as made:
        for path in folder.iterdir():
            if path.name != _GRAPH:
                (Path(made) / path.name).symlink_to(path)
        (Path(made) / _GRAPH).write_bytes(content)
        yield Path(made)


async def run_model(model: RunnableModel, arrays: Mapping[str, Array]) -> list[Tensor]:
    """Run a model on one set of inputs, which have been checked.

    Raises:
        ModelFailure: OpenVINO failed.

    Cancellation: while it waits or runs; the run is then stopped.
    """
    request = InferRequest(model.name, model.version)
    for spec in model.servable.metadata.inputs:
        array = arrays[spec.name]
        request.inputs.append(InferInput(spec.name, spec.datatype.name, array.shape))
        request.raw_inputs.append(_framed(array) if spec.datatype is BYTES else array.reshape(-1).view(np.uint8).data)
    response = await model.servable.infer(request)
    # Raw tensors only come from user code, which is not what runs here.
    return [output for output in response.outputs if not isinstance(output, RawTensor)]


def _framed(array: Array) -> bytes:
    return b"".join(_LENGTH.pack(len(value)) + value for value in array.flat)


@dataclass(frozen=True, slots=True, eq=False)
class BatchedRun:
    """What one caller wants to run; ``size`` is its part of a batch."""

    model: RunnableModel
    arrays: Mapping[str, Array]
    size: int


async def submit(
    batcher: Batcher[BatchedRun, list[Tensor]], model: RunnableModel, arrays: Mapping[str, Array]
) -> list[Tensor]:
    """Run a model together with other callers whose inputs have the same shapes but for the first dimension.

    Raises:
        UserRuntimeException: an input or output has no first dimension to join along.
        Exception: as :meth:`Batcher.submit`.

    Cancellation: as :meth:`Batcher.submit`.
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
    """Run the inputs of several callers of one model at once, and divide the outputs among them.

    Raises:
        UserRuntimeException: an output cannot be divided.
        ModelFailure: OpenVINO failed.

    Cancellation: as :func:`run_model`.
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
            raise UserRuntimeException("Batched output tensor has 0 dimensions.", f"it is {output.name!r}")
        if output.shape[0] != size:
            raise UserRuntimeException(
                "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the inputs",
                f"{output.name!r} has {output.shape[0]} of {size}",
            )
