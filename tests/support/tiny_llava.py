"""A LLaVA of seeded weights, which loads within a second; ``tests/data/make_tiny_llava.py`` made it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.support.archives import unpack

_ARCHIVE: Final = Path(__file__).parents[1] / "data" / "tiny_llava.tar.xz"

EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Properties with which all attention implementations compute the same text."""


def write_tiny_llava(directory: Path) -> Path:
    unpack(_ARCHIVE, directory)
    return directory


def noise(seed: int, width: int = 60, height: int = 40) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image."""
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def image_file(pixels: npt.NDArray[np.uint8], form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
