"""Samples whose models are wheels of a package index, prepared from the cache of the user, never from the network."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from platformdirs import user_cache_path

from ovmstrio_samples.catalog import BY_NAME, Wheel
from ovmstrio_samples.preparing import prepare_sample

WHEELS: Final = user_cache_path("ovmstrio") / "wheels"


def prepare_cached(name: str, repository: Path, *further: Wheel) -> list[Path]:
    """Prepare a sample in a repository; skip the test if its wheel or a further one is not in the cache."""
    wheels = [each for each in (BY_NAME[name].wheel, *further) if each is not None]
    if not all((WHEELS / wheel.filename).is_file() for wheel in wheels):
        pytest.skip(f"not in the cache: ovms prepare --sample {name}")
    return prepare_sample(BY_NAME[name], repository, 1, WHEELS)
