"""What PyTorch's files hold, as their tables of contents tell without torch: programs, or weights alone."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["EXPORT", "SCRIPT", "torch_framework_of", "was_traced"]

EXPORT: Final = "PyTorch export"
SCRIPT: Final = "TorchScript"

_WAY_OUT: Final = (
    "load the weights into their module and write torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
_MARKS_OF_EXPORTS: Final = ("archive_format", "serialized_exported_program.json")
_TRACED: Final = "traced_inputs.pkl"


def torch_framework_of(source: Path) -> str:
    """Tell whether a file holds a program of ``torch.export`` or TorchScript, whatever its suffix.

    Raises:
        ConfigError: it holds pickled objects, such as weights, that tell no computation, or is no such file.
    """
    inner = _entries(source)
    if inner & {*_MARKS_OF_EXPORTS}:
        return EXPORT
    if any(entry.startswith("code/") for entry in inner):
        return SCRIPT
    message = "holds pickled objects of PyTorch, such as weights, and no program"
    raise ConfigError([Problem(message, file=str(source), suggestion=_WAY_OUT)])


def was_traced(source: Path) -> bool:
    """Tell whether TorchScript was written with the inputs that it was traced with."""
    return _TRACED in _entries(source)


def _entries(source: Path) -> set[str]:
    """Give the names of what is in a file, with the folder that they all lie in and without it.

    Raises:
        ConfigError: it is no archive.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        message = f"is no file that PyTorch writes programs to: {error}"
        raise ConfigError([Problem(message, file=str(source), suggestion=_WAY_OUT)]) from error
    return {entry.partition("/")[2] for entry in entries} | set(entries)
