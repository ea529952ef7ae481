"""Preparation of the sample file_type: copies the model of the package magika without importing magika."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Final

__all__ = ["ENTRIES", "installed_files"]

_INSIDE: Final = Path("models") / "standard_v3_3"


def installed_files() -> Path | None:
    """Return the folder with ``model.onnx`` and ``config.min.json``, or None if magika is not installed."""
    spec = importlib.util.find_spec("magika")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / _INSIDE
    return folder if (folder / "model.onnx").is_file() else None


def write(files: Path, directory: Path) -> None:
    """Write the version directory with the unmodified model."""
    shutil.copyfile(files / "model.onnx", directory / "model.onnx")


ENTRIES = {"file_type": write}
