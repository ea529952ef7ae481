"""Prepare what is served as its makers wrote it: a model's file, or the files of a graph or of custom nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["copy", "copy_files", "copy_graph"]


def copy(filename: str) -> Callable[[Path, Path], None]:
    """Make what writes a version directory: the file under the name ``model``, or the whole of a folder."""

    def write(files: Path, directory: Path) -> None:
        source = files / filename
        if source.is_dir():
            shutil.copytree(source, directory, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, directory / f"model{source.suffix}")

    return write


def copy_files(home: str, *filenames: str) -> Callable[[Path, Path], None]:
    """Make what writes a folder of the named files, from beside the module ``home``."""

    def write(_files: Path, directory: Path) -> None:
        for filename in filenames:
            shutil.copyfile(Path(home).with_name(filename), directory / filename)

    return write


def copy_graph(home: str, *filenames: str) -> Callable[[Path, Path], None]:
    """Make what writes a graph's folder: ``graph.pbtxt`` and the named files, from beside the module ``home``."""
    return copy_files(home, "graph.pbtxt", *filenames)
