"""Which files of a folder are a Paddle model, and a copy of them that OpenVINO's frontend accepts.

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

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.paddle_program import Program, read_program

__all__ = ["PaddleFiles", "find_paddle_files", "load_program", "readable"]

_PROGRAM: Final = "__model__"
_PARAMETERS: Final = "__params__"


@dataclass(frozen=True, slots=True)
class PaddleFiles:
    """A model's program and the file with its parameters; without one, each parameter has a file beside the program."""

    program: Path
    parameters: Path | None


def _refused(folder: Path, message: str, suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(folder), suggestion=suggestion)])


def find_paddle_files(folder: Path) -> PaddleFiles:
    """Find the model in a folder; of several ``*.pdmodel`` the first by name.

    Raises:
        ConfigError: there is none, or a model without its parameters.
    """
    if not folder.is_dir():
        raise _refused(folder, "no such folder", "model_config is a folder with serving_server_conf.prototxt")
    for program in sorted(folder.glob("*.pdmodel")):
        parameters = program.with_suffix(".pdiparams")
        if not parameters.is_file():
            raise _refused(folder, f"{program.name} is there without its parameters {parameters.name}")
        return PaddleFiles(program, parameters)
    program = folder / _PROGRAM
    if program.is_file():
        together = folder / _PARAMETERS
        return PaddleFiles(program, together if together.is_file() else None)
    if list(folder.glob("*.json")) and list(folder.glob("*.pdiparams")):
        way_out = "export the model with FLAGS_enable_pir_api=0, which writes a .pdmodel"
        raise _refused(folder, "the model is in the format of Paddle 3, which OpenVINO cannot read", way_out)
    raise _refused(folder, "the folder holds no *.pdmodel with *.pdiparams, and no __model__")


def load_program(files: PaddleFiles) -> Program:
    """Read the program's version and operations.

    Raises:
        ConfigError: the file cannot be read, or is no program.
    """
    try:
        return read_program(files.program.read_bytes())
    except OSError as error:
        raise _refused(files.program, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # includes names that are not UTF-8
        raise _refused(files.program, f"is no Paddle program: {error}", "is it encrypted, or incomplete?") from error


@contextmanager
def readable(files: PaddleFiles, program: Program) -> Iterator[Path]:
    """Give what OpenVINO's Paddle frontend can load, for as long as the block lasts: a file or a folder."""
    with tempfile.TemporaryDirectory(prefix="paddle-") as scratch:
        folder = Path(scratch)
        if files.parameters is not None:
            given = folder / "model.pdmodel"
            (folder / "model.pdiparams").symlink_to(files.parameters.resolve())
            given.write_bytes(program.readable())
        else:
            given = folder
            for parameter in files.program.parent.iterdir():
                if parameter.is_file() and parameter.name != _PROGRAM:
                    (folder / parameter.name).symlink_to(parameter.resolve())
            (folder / _PROGRAM).write_bytes(program.readable())
        yield given
