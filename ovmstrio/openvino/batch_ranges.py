"""Let a model take batches of every size, and see to it that each row of its inputs has one row in each output.

OpenVINO tells the bounds of every output for given bounds of the inputs: with 1 to 16 rows in, an output of 1 to 16
rows has a row for each of them, while one of 0 to 160 (positions of what is not zero) or of 2 to 32 has not.
"""

from __future__ import annotations

from collections.abc import Mapping

import openvino as ov
import structlog

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import BatchingSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Dim, TensorSpec
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import ModelSignature, read_signature, to_partial_shape

__all__ = ["take_batches"]

log = structlog.get_logger(__name__)


def take_batches(model: ov.Model, batching: BatchingSpec, mapping: TensorMapping, file: str) -> None:
    """Make the batch dimension of each input a range up to the largest batch, unless it takes all of these already.

    Raises:
        ConfigError: a tensor has no batch dimension, the model cannot take another batch, or an output has not one row
            for each row of the inputs.
    """
    signature = read_signature(model, mapping, file)
    _refuse([_no_batch("input", tensor, file) for tensor in signature.inputs if tensor.batch_axis is None])
    rows = Dim(1, batching.max_batch_size)
    # A range of one size would tell nothing of the outputs.
    probe = Dim(1, max(batching.max_batch_size, 2))
    _reshape(model, _shapes(signature, probe, keep_open=False), file)
    _check_outputs(read_signature(model, mapping, file), probe, file)
    _reshape(model, _shapes(signature, rows, keep_open=True), file)


def _shapes(signature: ModelSignature, rows: Dim, *, keep_open: bool) -> dict[int, tuple[Dim, ...]]:
    shapes: dict[int, tuple[Dim, ...]] = {}
    for port, tensor in zip(signature.input_ports, signature.inputs, strict=True):
        axis = tensor.batch_axis or 0
        own = tensor.shape[axis]
        kept = keep_open and own.accepts(rows.low) and own.accepts(rows.high)
        shapes[port] = (*tensor.shape[:axis], own if kept else rows, *tensor.shape[axis + 1 :])
    return shapes


def _reshape(model: ov.Model, shapes: Mapping[int, tuple[Dim, ...]], file: str) -> None:
    try:
        model.reshape({model.inputs[port]: to_partial_shape(dims) for port, dims in shapes.items()})
    except OPENVINO_ERRORS as error:
        message = f"the model cannot take batches of another size: {reason(error)}"
        _refuse([Problem(message, file=file, path="batching", suggestion="leave batching out")])


def _check_outputs(signature: ModelSignature, rows: Dim, file: str) -> None:
    problems: list[Problem] = []
    for tensor in signature.outputs:
        if tensor.batch_axis is None:
            problems.append(_no_batch("output", tensor, file))
            continue
        found = tensor.shape[tensor.batch_axis]
        if found.high == -1:
            log.warning("rows of an output are known at run time only", output=tensor.name, file=file)
        elif found != rows:
            message = f"output {tensor.name!r} has not one row for each row of the inputs"
            expected, suggestion = f"{rows} rows for {rows} rows of input", "leave batching out"
            problems.append(Problem(message, file, None, "batching", expected, str(tensor), suggestion))
    _refuse(problems)


def _no_batch(side: str, tensor: TensorSpec, file: str) -> Problem:
    message = f"{side} {tensor.name!r} has no batch dimension"
    suggestion = "set a layout with N, or leave batching out"
    return Problem(message, file, None, "batching", "a batch dimension", str(tensor), suggestion)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)
