"""Find the model that the package magika carries, without importing magika and the runtime that it brings."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Final

__all__ = ["ENTRIES", "installed_files"]

_INSIDE: Final = Path("models") / "standard_v3_3"


def installed_files() -> Path | None:
    """Give the folder with ``model.onnx`` and ``config.min.json``, None when magika is not installed."""
    spec = importlib.util.find_spec("magika")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / _INSIDE
    return folder if (folder / "model.onnx").is_file() else None


def write(files: Path, directory: Path) -> None:
    """Write the version directory: the model as it came."""
    shutil.copyfile(files / "model.onnx", directory / "model.onnx")


ENTRIES = {"file_type": write}
