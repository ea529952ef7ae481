"""Preparation of samples whose files are served unmodified: models, graphs and custom nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["copy", "copy_files", "copy_graph"]


def copy(filename: str) -> Callable[[Path, Path], None]:
    """Return a function that fills a version directory with a file, renamed to ``model``, or with a folder's files."""

    def write(files: Path, directory: Path) -> None:
        source = files / filename
        if source.is_dir():
            shutil.copytree(source, directory, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, directory / f"model{source.suffix}")

    return write


def copy_files(home: str, *filenames: str) -> Callable[[Path, Path], None]:
    """Return a function that copies the named files from the folder of the module ``home``."""

    def write(_files: Path, directory: Path) -> None:
        for filename in filenames:
            shutil.copyfile(Path(home).with_name(filename), directory / filename)

    return write


def copy_graph(home: str, *filenames: str) -> Callable[[Path, Path], None]:
    """Return a function that copies ``graph.pbtxt`` and the named files from the folder of the module ``home``."""
    return copy_files(home, "graph.pbtxt", *filenames)
