"""Read Paddle models of any age into OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
from openvino.frontend import FrontEndManager, NodeContext
from openvino.frontend.paddle import ConversionExtension

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.paddle_files import find_paddle_files, load_program, readable
from ovmstrio.openvino.paddle_program import Program
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason

__all__ = ["read_paddle"]

_SEQUENCES: Final = ("sequence_", "lod_", "im2sequence", "gru", "lstm")
"""Beginnings of operations on batches of sequences of different lengths (LoD), which OpenVINO has not."""


def read_paddle(folder: Path) -> ov.Model:
    """Read the model of a folder, in whichever of Paddle's three layouts it is.

    Raises:
        ConfigError: there is no model, or OpenVINO cannot convert it; the message names what stands in the way.
    """
    files = find_paddle_files(folder)
    program = load_program(files)
    frontend = FrontEndManager().load_by_framework("paddle")
    frontend.add_extension(ConversionExtension("mul", _mul))
    try:
        with readable(files, program) as source:
            return frontend.convert(frontend.load(str(source)))
    except OPENVINO_ERRORS as error:
        raise ConfigError([_cannot_convert(files.program, program, error)]) from error


def _cannot_convert(file: Path, program: Program, error: BaseException) -> Problem:
    on_sequences = sorted(kind for kind in program.operations if kind.startswith(_SEQUENCES))
    if on_sequences:
        message = f"OpenVINO has no operations on LoD tensors, and the model uses {', '.join(on_sequences)}"
        return Problem(message, file=str(file), suggestion="export a model that takes padded batches instead")
    return Problem(f"OpenVINO cannot convert the model: {reason(error)}", file=str(file))


def _mul(node: NodeContext) -> dict[str, list[ov.Output]]:
    """Convert ``mul``, which Paddle writes for fully connected layers: a product of matrices.

    Each side is made a matrix by joining the dimensions before and after a position that is an attribute.
    """
    left, right = node.get_input("X"), node.get_input("Y")
    left_rows, right_rows = (int(node.get_attribute(f"{side}_num_col_dims", 1)) for side in "xy")
    product = op.matmul(_matrix(left, left_rows), _matrix(right, right_rows), False, False)
    if _is_matrix(left, left_rows) and _is_matrix(right, right_rows):
        return {"Out": [product.output(0)]}
    shape = op.concat([_sizes(left, 0, left_rows), _sizes(right, right_rows, None)], 0)
    return {"Out": [op.reshape(product, shape, special_zero=False).output(0)]}


def _is_matrix(value: ov.Output, rows: int) -> bool:
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static) and (len(shape), rows) == (2, 1)


def _sizes(value: ov.Output, start: int, end: int | None) -> ov.Node:
    last = np.iinfo(np.int64).max if end is None else end
    numbers = (np.array([number], np.int64) for number in (start, last, 1, 0))
    return op.slice(op.shape_of(value, "i64"), *numbers)


def _matrix(value: ov.Output, rows: int) -> ov.Output:
    if _is_matrix(value, rows):
        return value
    joined = [op.reduce_prod(_sizes(value, *span), np.array([0]), keep_dims=True) for span in ((0, rows), (rows, None))]
    return op.reshape(value, op.concat(joined, 0), special_zero=False).output(0)
