"""Decoding of image files with Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

from PIL import Image, UnidentifiedImageError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.models.request_errors import invalid_request

_DECODED_MODES: Final = {
    "P": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "LAB": "RGB",
    "HSV": "RGB",
    "1": "L",
    "LA": "RGBA",
    "PA": "RGBA",
}


MAX_PIXELS: Final = 80_000_000
"""Limit of decoded images, checked before decoding."""


_FORMATS: Final = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
"""Common formats of OpenCV; no format that runs an external program."""


_UNREADABLE: Final = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    ArithmeticError,
    LookupError,
    TypeError,
    struct.error,
    zlib.error,
    Warning,  # if warnings are errors
    Image.DecompressionBombError,
)
"""Exceptions of Pillow's decoders for damaged files."""


def decoded(encoded: bytes, spec: TensorSpec) -> Image.Image:
    """Decode an image file; palettes and other colour spaces become RGB, RGBA or grey.

    Raises:
        InvalidRequest: the format is unknown, or the image is damaged or too large.
    """
    try:
        image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise _unreadable(spec, f"{image.width} x {image.height} pixels exceed the limit of {MAX_PIXELS}")
        if image.mode in _DECODED_MODES:
            return image.convert(_DECODED_MODES[image.mode])
        image.load()
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        # Pillow's message contains only a memory address.
        detail = f"its {len(encoded)} bytes are not an image of a known format ({', '.join(_FORMATS)})"
        raise _unreadable(spec, detail) from None
    except _UNREADABLE as error:
        raise _unreadable(spec, str(error) or type(error).__name__) from None
    return image


def _unreadable(spec: TensorSpec, detail: str) -> InvalidRequest:
    return invalid_request("Image parsing failed", f"{detail}; input name: {spec.name}")


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image bilinearly."""
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)
