"""Read Paddle models of any age into OpenVINO: which files of a folder they are, and a copy that its frontend accepts.

Paddle has saved models in three ways: one ``*.pdmodel`` with one ``*.pdiparams``; ``__model__`` with all parameters in
``__params__``; ``__model__`` with a file for each parameter.  OpenVINO reads the first by its suffixes, the last as a
folder, and programs written by Paddle before 2.0 only if they do not tell their version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
from openvino.frontend import FrontEndManager, NodeContext
from openvino.frontend.paddle import ConversionExtension

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.texts import cut
from ovmstrio.openvino.paddle_program import PaddleProgram, read_program, variable_names
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["PROGRAM", "PaddleFiles", "find_paddle_files", "load_program", "read_paddle", "readable"]

_SEQUENCES: Final = ("sequence_", "lod_", "im2sequence", "gru", "lstm")
"""Beginnings of operations on batches of sequences of different lengths (LoD), which OpenVINO has not."""


def read_paddle(source: Path) -> ov.Model:
    """Read the model of a folder, in whichever of Paddle's three layouts it is, or that of a program file in one.

    Raises:
        ConfigError: there is no model, or OpenVINO cannot convert it; the message names what stands in the way.
    """
    files = find_paddle_files(source)
    program = load_program(files)
    frontend = FrontEndManager().load_by_framework("paddle")
    frontend.add_extension(ConversionExtension("mul", _mul))
    try:
        with readable(files, program) as given:
            return frontend.convert(frontend.load(str(given)))
    except ConfigError:
        raise
    except OPENVINO_ERRORS as error:
        raise ConfigError([_cannot_convert(files.program, program, error)]) from error


def _cannot_convert(file: Path, program: PaddleProgram, error: BaseException) -> Problem:
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


PROGRAM: Final = "__model__"
_PARAMETERS: Final = "__params__"
_SUFFIX: Final = ".pdmodel"


@dataclass(frozen=True, slots=True)
class PaddleFiles:
    """A model's program and the file with its parameters; without one, each parameter has a file beside the program."""

    program: Path
    parameters: Path | None


def _refused(folder: Path, message: str, suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(folder), suggestion=suggestion)])


def find_paddle_files(source: Path) -> PaddleFiles:
    """Find the files of a model: those of a ``*.pdmodel``, or of a folder, of several there the first by name.

    Raises:
        ConfigError: there is none, or a model without its parameters.
    """
    if source.suffix == _SUFFIX and source.is_file():
        return _with_parameters(source)
    folder = source.parent if source.name == PROGRAM and source.is_file() else source
    if not folder.is_dir():
        raise _refused(folder, "no such folder", "model_config is a folder with serving_server_conf.prototxt")
    for program in sorted(folder.glob(f"*{_SUFFIX}")):
        return _with_parameters(program)
    program = folder / PROGRAM
    if program.is_file():
        together = folder / _PARAMETERS
        return PaddleFiles(program, together if together.is_file() else None)
    if list(folder.glob("*.json")) and list(folder.glob("*.pdiparams")):
        way_out = "export the model with FLAGS_enable_pir_api=0, which writes a .pdmodel"
        raise _refused(folder, "the model is in the format of Paddle 3, which OpenVINO cannot read", way_out)
    raise _refused(folder, "the folder holds no *.pdmodel with *.pdiparams, and no __model__")


def _with_parameters(program: Path) -> PaddleFiles:
    parameters = program.with_suffix(".pdiparams")
    if not parameters.is_file():
        raise _refused(program.parent, f"{program.name} is there without its parameters {parameters.name}")
    return PaddleFiles(program, parameters)


def load_program(files: PaddleFiles) -> PaddleProgram:
    """Read the program's version and operations.

    Raises:
        ConfigError: the file cannot be read, or is no program.
    """
    try:
        return read_program(read_regular_bytes(files.program, max_bytes=None))
    except OSError as error:
        raise _refused(files.program, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # includes names that are not UTF-8
        raise _refused(files.program, f"is no Paddle program: {error}", "is it encrypted, or incomplete?") from error


def _check_names(file: Path, program: PaddleProgram) -> None:
    """Check the names of parameters that have a file each: OpenVINO takes the names for paths.

    Raises:
        ConfigError: a name leads out of the folder.
    """
    try:
        names = list(variable_names(program.content))
    except ValueError as error:
        raise _refused(file, f"is no Paddle program: {error}") from None
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name or "\\" in name:
            raise _refused(file, f"the parameter {cut(name, 80)!r} is outside of the model's folder")


@contextmanager
def readable(files: PaddleFiles, program: PaddleProgram) -> Iterator[Path]:
    """Give what OpenVINO's Paddle frontend can load, for as long as the block lasts: a file or a folder."""
    if files.parameters is None:
        _check_names(files.program, program)
    with tempfile.TemporaryDirectory(prefix="paddle-") as scratch:
        folder = Path(scratch)
        if files.parameters is not None:
            given = folder / "model.pdmodel"
            (folder / "model.pdiparams").symlink_to(files.parameters.resolve())
            given.write_bytes(program.readable())
        else:
            given = folder
            for parameter in files.program.parent.iterdir():
                if parameter.is_file() and parameter.name != PROGRAM:
                    (folder / parameter.name).symlink_to(parameter.resolve())
            (folder / PROGRAM).write_bytes(program.readable())
        yield given
