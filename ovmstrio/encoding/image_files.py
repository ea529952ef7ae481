"""Decoding of image files with Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

from PIL import Image, UnidentifiedImageError

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


class InvalidImage(ValueError):
    """An image file cannot be decoded; the message gives the reason."""


def decode_image(encoded: bytes, *, max_pixels: int | None = None) -> Image.Image:
    """Decode an image file; palettes and other colour spaces become RGB, RGBA or grey.

    ``max_pixels`` is :data:`MAX_PIXELS` by default.

    Raises:
        InvalidImage: the format is unknown, or the image is damaged or too large.
    """
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    try:
        image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
        if image.width * image.height <= limit:
            if image.mode in _DECODED_MODES:
                return image.convert(_DECODED_MODES[image.mode])
            image.load()
            return image
    except UnidentifiedImageError:
        # Pillow's message contains only a memory address.
        formats = ", ".join(_FORMATS)
        raise InvalidImage(f"its {len(encoded)} bytes are not an image of a known format ({formats})") from None
    except _UNREADABLE as error:
        raise InvalidImage(str(error) or type(error).__name__) from None
    raise InvalidImage(f"{image.width} x {image.height} pixels exceed the limit of {limit}")


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image bilinearly."""
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)
