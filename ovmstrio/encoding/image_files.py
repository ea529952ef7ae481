"""Decoding of image files with Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

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


class ImageFileError(ValueError):
    """An image file has an unknown format, or is damaged or too large."""


def decoded(encoded: bytes, max_pixels: int | None = None) -> Image.Image:
    """Decode an image file; palettes and other colour spaces become RGB, RGBA or grey.

    ``max_pixels`` is :data:`MAX_PIXELS` by default.

    Raises:
        ImageFileError: the format is unknown, or the image is damaged or too large.
    """
    try:
        image = _open(encoded, MAX_PIXELS if max_pixels is None else max_pixels)
        if image.mode in _DECODED_MODES:
            return image.convert(_DECODED_MODES[image.mode])
        image.load()
    except _UNREADABLE as error:
        raise _unreadable(error, encoded) from None
    return image


def upright_size(encoded: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height of the result of :func:`decoded_upright`, from the head of the file.

    Raises:
        ImageFileError: the format is unknown, or the image is too large.
    """
    try:
        image = _open(encoded, max_pixels)
        is_turned = _orientation(image) in _TURNED
    except _UNREADABLE as error:
        raise _unreadable(error, encoded) from None
    return (image.height, image.width) if is_turned else image.size


def decoded_upright(encoded: bytes) -> Image.Image:
    """Decode an image file to RGB, turned as its metadata says, with transparent parts on white.

    Raises:
        ImageFileError: the format is unknown, or the image is damaged or too large.
    """
    try:
        image = _open(encoded, MAX_PIXELS)
        if _orientation(image) is not None:
            image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        elif image.mode.startswith("I;16"):
            # Pillow would cut the values at 255.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")
    except _UNREADABLE as error:
        raise _unreadable(error, encoded) from None


def blank_image(width: int, height: int) -> bytes:
    """Return a small file of a black image."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG", compress_level=1)
    return file.getvalue()


_ORIENTATION: Final = 0x0112  # EXIF tag
_TURNED: Final = range(5, 9)  # orientations that swap width and height


def _orientation(image: Image.Image) -> int | None:
    """Return the orientation in the head of a file, unless Pillow applies it; metadata elsewhere are not read."""
    if "exif" not in image.info or image.format == "TIFF":
        return None
    orientation: int | None = image.getexif().get(_ORIENTATION)
    return orientation


def _open(encoded: bytes, max_pixels: int) -> Image.Image:
    image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
    if image.width * image.height > max_pixels:
        raise ImageFileError(f"{image.width} x {image.height} pixels exceed the limit of {max_pixels}")
    return image


def _unreadable(error: Exception, encoded: bytes) -> ImageFileError:
    if isinstance(error, UnidentifiedImageError):
        # Pillow's message contains only a memory address.
        return ImageFileError(f"its {len(encoded)} bytes are not an image of a known format ({', '.join(_FORMATS)})")
    return error if isinstance(error, ImageFileError) else ImageFileError(str(error) or type(error).__name__)


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image bilinearly."""
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)
