"""Decoding of images (JPEG, PNG, ...) sent as BYTES to an input that expects pixels.

Images become BGR, channels last, in the input's element type without scaling, resized bilinearly to a fixed height and
width of the model. OVMS uses OpenCV: Pillow's JPEG values may differ by a few units, and Pillow smooths when it
downscales. 16-bit depth is kept for grey images only.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.core.tensor import Array, Dim, TensorSpec
from ovmstrio.models.request_errors import format_shape, input_mismatch, invalid_request
from ovmstrio.models.tensor_contents import bytes_elements

IMAGE_RANK: Final = 4
_DATATYPES: Final = {"FP32", "FP64", "FP16", "INT16", "UINT8", "INT8", "UINT16", "INT32"}
_CHANNELS_LAST: Final = "NHWC"
_BGR_ORDER: Final = {3: (2, 1, 0), 4: (2, 1, 0, 3)}


def decode_batch(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> Array:
    """Decode the images of a request into one array of the input's element type.

    Raises:
        InvalidRequest: the element type, layout, number, channels or sizes do not match, or an image cannot be decoded.
    """
    if spec.datatype.name not in _DATATYPES:
        raise InvalidRequest(
            f"Functionality not implemented - encoded images for {spec.datatype.name}; input name: {spec.name}"
        )
    if not _is_channels_last(spec.layout):
        raise input_mismatch("Unsupported layout for encoded images", "NHWC", spec.layout, spec)
    if len(given.shape) != 1:
        raise input_mismatch("Invalid number of shape dimensions", "(-1)", format_shape(given.shape), spec)
    elements = bytes_elements(given, raw, spec)
    if given.shape[0] != len(elements):
        raise input_mismatch("Invalid input batch size", given.shape[0], f"{len(elements)} images", spec)
    if not elements or not spec.shape[0].accepts(len(elements)):
        raise input_mismatch("Invalid input batch size", spec.shape[0], len(elements), spec)
    images = [_decode(element, spec) for element in elements]
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(sorted({format_shape(image.shape) for image in images}))
        raise input_mismatch("Binary images resolution mismatch", "one resolution", sizes, spec)
    return np.stack(images)


def _is_channels_last(layout: str) -> bool:
    """Return whether ``layout`` can be NHWC: each letter matches or is unknown."""
    before, dots, after = layout.partition("...")
    unnamed = IMAGE_RANK - len(before) - len(after) if dots or not layout else 0
    letters = before + "?" * unnamed + after
    return len(letters) == IMAGE_RANK and all(
        letter in ("?", wanted) for letter, wanted in zip(letters, _CHANNELS_LAST, strict=True)
    )


def _decode(encoded: bytes, spec: TensorSpec) -> Array:
    from ovmstrio.models.image_files import decoded, resized  # noqa: PLC0415 - imported when first needed

    if not encoded:
        raise invalid_request("Bytes contents empty", f"expected an encoded image; input name: {spec.name}")
    _, height, width, channels = spec.shape
    image = decoded(encoded, spec)
    depth = len(image.getbands())
    if not channels.accepts(depth):
        raise input_mismatch("Invalid number of channels in binary input", channels, depth, spec)
    size = (_nearest(width, image.width), _nearest(height, image.height))
    pixels = np.asarray(resized(image, size))
    if pixels.ndim == 2:  # noqa: PLR2004 - height and width
        pixels = pixels[:, :, np.newaxis]
    if depth in _BGR_ORDER:
        pixels = pixels[:, :, _BGR_ORDER[depth]]
    # The reversed view is not contiguous, which OpenVINO requires.
    return np.ascontiguousarray(pixels, spec.datatype.numpy)


def _nearest(allowed: Dim, size: int) -> int:
    """Return the allowed size nearest to ``size``."""
    size = max(size, allowed.low)
    return size if allowed.high == -1 else min(size, allowed.high)


# Pillow
