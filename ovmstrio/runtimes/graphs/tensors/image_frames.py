"""Pictures: height, width and channels of a pixel format that MediaPipe knows."""

from __future__ import annotations

from math import prod
from typing import Final

from ovmstrio.core.datatypes import BY_NAME, Datatype
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.runtimes.graphs.packets import ImageFrame
from ovmstrio.runtimes.graphs.tensors.graph_rejections import (
    CONTENT_SIZE,
    INPUT_FORMAT,
    MAX_BYTES,
    too_large,
    zero_dimension,
)
from ovmstrio.runtimes.models.buffers import wrapped
from ovmstrio.runtimes.models.rejections import refused, show_shape

__all__ = ["read_image"]

_RANK: Final = 3
_INTEGER_CHANNELS: Final = frozenset({1, 3, 4})
_FLOAT_CHANNELS: Final = frozenset({1, 2, 4})

# FP16 and signed pixels keep their bits and are called what MediaPipe calls the format.
_FORMATS: Final = {
    "UINT8": (BY_NAME["UINT8"], _INTEGER_CHANNELS),
    "INT8": (BY_NAME["UINT8"], _INTEGER_CHANNELS),
    "UINT16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "INT16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "FP16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "FP32": (BY_NAME["FP32"], _FLOAT_CHANNELS),
}


def read_image(given: InferInput, raw: Buffer | None) -> ImageFrame:
    """Make a picture of one input of a request.

    Raises:
        InvalidRequest: it is not three dimensions of a known pixel format, or did not come in raw contents.
    """
    if raw is None:
        fixed = "Mediapipe execution failed. MP status"
        raise refused(fixed, f"images must be in raw_input_contents; input name: {given.name}")
    shape = given.shape
    if len(shape) != _RANK:
        detail = f"Expected: (height,width,channels); Actual: {show_shape(shape)}; input name: {given.name}"
        raise refused("Invalid input shape", detail)
    if any(size < 1 for size in shape):
        raise zero_dimension(given)
    datatype = _pixels(given)
    expected = prod(shape) * datatype.itemsize
    if expected > MAX_BYTES:
        raise too_large(given)
    if len(raw) != expected:
        sizes = f"Actual: {len(raw)}; Expected: {expected}"
        raise refused(CONTENT_SIZE, f"Invalid Mediapipe Image input buffer size. {sizes}; input name: {given.name}")
    return ImageFrame(datatype, wrapped(raw, shape, datatype.numpy))


def _pixels(given: InferInput) -> Datatype:
    """Give the element type of the pixel format that datatype and channels make."""
    channels = given.shape[-1]
    known = _FORMATS.get(given.datatype)
    if known is None:
        detail = f"Expected: {', '.join(_FORMATS)}; Actual: {given.datatype}; input name: {given.name}"
        raise refused(INPUT_FORMAT, detail)
    datatype, allowed = known
    if channels not in allowed:
        wanted = ", ".join(map(str, sorted(allowed)))
        detail = f"Expected channels of {given.datatype}: {wanted}; Actual: {channels}; input name: {given.name}"
        raise refused(INPUT_FORMAT, detail)
    return datatype
