"""Marks by which a change of what a pipeline is loaded from is seen: the libraries of its custom nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import python_files

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.specs import PipelineSpec

__all__ = ["pipeline_mark"]

_PYTHON: Final = ".py"


def pipeline_mark(spec: PipelineSpec) -> str:
    """Give a mark of the libraries' files that changes when one is written, appears or goes.

    With a Python file, the others of its directory count as well.  Libraries that are built in have no files.  What
    cannot be read is a state like any other.
    """
    return paths_mark(file for library in spec.libraries.values() for file in _files(library))


def _files(library: Path) -> set[Path]:
    if not library.is_absolute():
        return set()
    return {library, *python_files(library.parent)} if library.suffix == _PYTHON else {library}
