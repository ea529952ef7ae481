"""Preparation of the sample voice: copies Piper's model and its phoneme table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

__all__ = ["ENTRIES", "NAME", "write"]

NAME: Final = "en_US-joe-medium.onnx"


def write(files: Path, directory: Path) -> None:
    """Copy both files."""
    for name in (NAME, f"{NAME}.json"):
        shutil.copyfile(files / name, directory / name)


ENTRIES = {"voice": write}
