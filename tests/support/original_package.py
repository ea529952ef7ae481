"""The published package that our pipelines stand in for, to compare with; tests without it are skipped."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import pytest
from platformdirs import user_cache_path

WHEEL: Final = user_cache_path("ovmstrio") / "wheels" / "paddle_serving_server-0.9.0-py3-none-any.whl"


def unpack_original(folder: Path) -> Path:
    """Unpack the package below a folder, which is given back; skips the test if nobody has fetched it."""
    if not WHEEL.is_file():
        pytest.skip(f"not in {WHEEL.parent}: pip download --no-deps paddle-serving-server==0.9.0")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder
