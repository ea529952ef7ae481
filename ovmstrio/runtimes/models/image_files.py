"""Files of images, as Pillow decodes them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

from PIL import Image, UnidentifiedImageError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.runtimes.models.rejections import refused

__all__ = ["decoded", "resized"]

MAX_PIXELS: Final = 80_000_000
"""Images that would be larger once decoded are refused before they are."""

_FORMATS: Final = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
"""What is decoded: OpenCV's common formats, and none that runs another program."""

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
    Warning,  # where the process was told to raise warnings
    Image.DecompressionBombError,
)
"""What Pillow's decoders raise on damaged files."""

_MODE_OF: Final = {
    "P": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "LAB": "RGB",
    "HSV": "RGB",
    "1": "L",
    "LA": "RGBA",
    "PA": "RGBA",
}


def decoded(encoded: bytes, spec: TensorSpec) -> Image.Image:
    """Decode a file, with a mode of as many channels as it has colours.

    Raises:
        InvalidRequest: it is none of the formats, damaged or too large.
    """
    try:
        image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise _unreadable(spec, f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
        if image.mode in _MODE_OF:
            return image.convert(_MODE_OF[image.mode])
        image.load()
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        # Its own text shows where the bytes lie instead of what they are.
        detail = f"its {len(encoded)} bytes are no image of a known format ({', '.join(_FORMATS)})"
        raise _unreadable(spec, detail) from None
    except _UNREADABLE as error:
        raise _unreadable(spec, str(error) or type(error).__name__) from None
    return image


def _unreadable(spec: TensorSpec, detail: str) -> InvalidRequest:
    return refused("Image parsing failed", f"{detail}; input name: {spec.name}")


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Give an image in a width and height, by bilinear interpolation."""
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)
