"""Put a voice of Piper into a folder: its network, and the file that says which numbers phonemes have."""

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
