"""Paths as a project's file writes them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ovmstrio.config.located import Located
from ovmstrio.config.value_rules import Unusable, written

__all__ = ["is_file", "is_folder", "local_path", "path_inside"]


def local_path(directory: Path, text: str) -> Path:
    """Give the path that leads on from a directory, without ``..``; links stay, for they may lead elsewhere later."""
    return Path(os.path.normpath(directory / text))


def is_file(path: Path) -> bool:
    """Tell whether there is a file that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_dir()
    return False


def path_inside(node: Located) -> str:
    """Take a path that leads nowhere but into the project's folder."""
    text = written(node)
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise Unusable("a path below the project's folder", message="only the project's folder is in the image")
    return text
