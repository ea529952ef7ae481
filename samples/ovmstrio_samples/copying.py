"""Prepare a model that is served as its makers wrote it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["copy"]


def copy(filename: str) -> Callable[[Path, Path], None]:
    """Make what writes a version directory: the file under the name ``model``, or the whole of a folder."""

    def write(files: Path, directory: Path) -> None:
        source = files / filename
        if source.is_dir():
            shutil.copytree(source, directory, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, directory / f"model{source.suffix}")

    return write
