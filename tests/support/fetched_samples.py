"""Models and packages from the wheels in the cache of the user; tests without them are skipped."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import pytest
from platformdirs import user_cache_path

from ovmstrio.samples.catalog import BY_NAME, Wheel
from ovmstrio.samples.preparing import prepare_sample

WHEELS: Final = user_cache_path("ovmstrio") / "wheels"


def prepare_cached(name: str, repository: Path, *further: Wheel) -> list[Path]:
    """Prepare a sample in a repository; skip the test if its wheel or a further one is not in the cache."""
    wheels = [each for each in (BY_NAME[name].wheel, *further) if each is not None]
    if not all((WHEELS / wheel.filename).is_file() for wheel in wheels):
        pytest.skip(f"not in the cache: ovms prepare --sample {name}")
    return prepare_sample(BY_NAME[name], repository, 1, WHEELS)


WHEEL: Final = user_cache_path("ovmstrio") / "wheels" / "paddle_serving_server-0.9.0-py3-none-any.whl"


def unpack_original(folder: Path) -> Path:
    if not WHEEL.is_file():
        pytest.skip(f"not in {WHEEL.parent}: pip download --no-deps paddle-serving-server==0.9.0")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder
