"""Conversion of image files to the pixels of a model input."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
_CHANNELS: Final = (1, 3)
_RANK: Final = 4


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options for image files: sent encoded, or decoded to values of (pixel - mean) / scale."""

    encoded: bool = False
    mean: float | None = None
    scale: float | None = None

    @property
    def scaled(self) -> bool:
        """Return whether pixel values are changed."""
        return self.mean is not None or self.scale is not None

    def check(self, arguments: Iterable[str]) -> None:
        """Check the options for contradictions, and against the file arguments, before any file is read.

        Raises:
            InvalidRequest: the options contradict each other or the arguments.
        """
        if not self.scaled:
            return
        if self.encoded:
            raise InvalidRequest("--mean and --scale apply to decoded images: remove --encoded")
        if self.scale == 0 or not all(map(math.isfinite, (self.mean or 0, self.scale or 0))):
            raise InvalidRequest("--mean and --scale: expected finite numbers, and a scale other than 0")
        if not any(is_image(Path(argument).suffix.lower()) for argument in arguments):
            raise InvalidRequest("--mean and --scale apply to images, but no --input is an image")


def is_image(suffix: str) -> bool:
    """Return whether a lower-case file suffix is that of an image."""
    return suffix in _SUFFIXES


def decode_image(content: bytes, file: str, tensor: TensorInfo, options: ImageOptions) -> Array:
    """Decode an image to the layout and size of a rank-4 input: RGB, values from 0 to 255 before scaling.

    Raises:
        InvalidRequest: the input does not take images, or the file is not an image.
    """
    if len(tensor.shape) != _RANK or not {tensor.shape[1], tensor.shape[3]} & set(_CHANNELS):
        raise InvalidRequest(f"{file}: input {tensor.name} {list(tensor.shape)} does not look like an image")
    first = tensor.shape[1] in _CHANNELS
    channels, height, width = (tensor.shape[i] for i in ((1, 2, 3) if first else (3, 1, 2)))
    pixels = _pixels(content, file, (channels, height, width))[None]
    if options.scaled:
        pixels = (pixels - np.float64(options.mean or 0)) / np.float64(1 if options.scale is None else options.scale)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) if first else pixels)


def _pixels(content: bytes, file: str, wanted: tuple[int, int, int]) -> Array:
    """Return an array of height, width, channels; a size of 0 or less keeps the image's size."""
    from ovmstrio.util.extras import Extra, missing_extra

    if missing := missing_extra("PIL", Extra.IMAGES):
        raise InvalidRequest(f"{file}: images need Pillow: {missing}")
    from PIL import Image, UnidentifiedImageError

    channels, height, width = wanted
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(content)).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError:
        raise InvalidRequest(f"{file}: not an image of a known format") from None
    except Exception as error:  # noqa: BLE001 - damaged files make decoders raise nearly anything
        raise InvalidRequest(f"{file}: not an image that can be decoded: {error}") from None
    size = (width if width > 0 else image.width, height if height > 0 else image.height)
    return np.asarray(image.resize(size)).reshape(size[1], size[0], channels)
