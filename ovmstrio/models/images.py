"""Encoded images (JPEG, PNG, ...) sent as BYTES to an input that takes pixels.

Images become BGR, channels last, cast to the input's element type without scaling, and are resized bilinearly to a
height and width that the model fixes.  OVMS decodes and resizes with OpenCV; Pillow, used here, decodes JPEG to
values that may differ by a few units, and smooths when it makes an image smaller, which OpenCV does not.  Sixteen bits
are kept for grey images only.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

import numpy as np
from PIL import Image, UnidentifiedImageError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.core.tensor import Array, Dim, TensorSpec
from ovmstrio.models.rejections import mismatch, refused, show_shape
from ovmstrio.models.tensor_contents import elements_of

__all__ = ["IMAGE_RANK", "decoded", "image_batch", "resized"]

# ----------------------------------------------------------------------
# Encoded images (JPEG, PNG, ...) sent as BYTES to an input that takes pixels
# ----------------------------------------------------------------------

IMAGE_RANK: Final = 4
_DATATYPES: Final = {"FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"}
_CHANNELS_LAST: Final = "NHWC"
_BGR_ORDER: Final = {3: (2, 1, 0), 4: (2, 1, 0, 3)}


def image_batch(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> Array:
    """Decode the images of a request into one array of the input's element type.

    Raises:
        InvalidRequest: the element type, layout, number, channels or sizes do not fit, or an image cannot be decoded.
    """
    if spec.datatype.name not in _DATATYPES:
        raise InvalidRequest(
            f"Functionality not implemented - encoded images for {spec.datatype.name}; input name: {spec.name}"
        )
    if not _takes_channels_last(spec.layout):
        raise mismatch("Unsupported layout for encoded images", "NHWC", spec.layout, spec)
    if len(given.shape) != 1:
        raise mismatch("Invalid number of shape dimensions", "(-1)", show_shape(given.shape), spec)
    elements = elements_of(given, raw, spec)
    if given.shape[0] != len(elements):
        raise mismatch("Invalid input batch size", given.shape[0], f"{len(elements)} images", spec)
    if not elements or not spec.shape[0].accepts(len(elements)):
        raise mismatch("Invalid input batch size", spec.shape[0], len(elements), spec)
    images = [_image(element, spec) for element in elements]
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(sorted({show_shape(image.shape) for image in images}))
        raise mismatch("Binary images resolution mismatch", "one resolution", sizes, spec)
    return np.stack(images)


def _takes_channels_last(layout: str) -> bool:
    """Tell whether ``layout`` can be NHWC: every position is unknown or the right letter."""
    before, dots, after = layout.partition("...")
    unnamed = IMAGE_RANK - len(before) - len(after) if dots or not layout else 0
    letters = before + "?" * unnamed + after
    return len(letters) == IMAGE_RANK and all(
        letter in ("?", wanted) for letter, wanted in zip(letters, _CHANNELS_LAST, strict=True)
    )


def _image(encoded: bytes, spec: TensorSpec) -> Array:
    if not encoded:
        raise refused("Bytes contents empty", f"an encoded image is expected; input name: {spec.name}")
    # Decoders are left alone by servers that are sent no images.

    _, height, width, channels = spec.shape
    image = decoded(encoded, spec)
    depth = len(image.getbands())
    if not channels.accepts(depth):
        raise mismatch("Invalid number of channels in binary input", channels, depth, spec)
    size = (_nearest(width, image.width), _nearest(height, image.height))
    pixels = np.asarray(resized(image, size))
    if pixels.ndim == 2:  # noqa: PLR2004 - height and width
        pixels = pixels[:, :, np.newaxis]
    if depth in _BGR_ORDER:
        pixels = pixels[:, :, _BGR_ORDER[depth]]
    # Reversed channels are a view in another order of memory, which the runtime does not take.
    return np.ascontiguousarray(pixels, spec.datatype.numpy)


def _nearest(allowed: Dim, size: int) -> int:
    """Give the size nearest to ``size`` that is allowed."""
    size = max(size, allowed.low)
    return size if allowed.high == -1 else min(size, allowed.high)


# ----------------------------------------------------------------------
# Files of images, as Pillow decodes them
# ----------------------------------------------------------------------

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
