"""Tensors of OpenVINO, MediaPipe and TensorFlow: arrays over the request's bytes, of whatever shape it names."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Final, Generic, TypeVar

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.runtimes.graphs.packets import MediaPipeTensor, OvTensor, TensorValue, TfTensor
from ovmstrio.runtimes.graphs.tensors.graph_rejections import (
    CONTENT_SIZE,
    MAX_BYTES,
    PRECISION,
    described,
    negative_dimension,
    too_large,
    zero_dimension,
)
from ovmstrio.runtimes.models.buffers import wrapped
from ovmstrio.runtimes.models.contents import to_array
from ovmstrio.runtimes.models.rejections import mismatch, refused

__all__ = ["MEDIAPIPE_DATATYPES", "ArrayReader", "read_mediapipe_tensor", "read_ov_tensor", "read_tf_tensor"]

NUMERIC_DATATYPES: Final = frozenset(BY_NAME) - {BYTES.name}
MEDIAPIPE_DATATYPES: Final = frozenset({"FP32", "FP16", "INT32", "INT8", "UINT8", "BOOL"})
"""What a tensor of MediaPipe's own can hold."""

_Value = TypeVar("_Value", bound=TensorValue)


class ArrayReader(Generic[_Value]):
    """Reads inputs into tensors of one class.

    Args:
        made: the class of tensors.
        datatypes: the names of the element types that it can hold.
        smallest: the smallest size of a dimension.
    """

    __slots__ = ("_datatypes", "_made", "_smallest")

    def __init__(self, made: type[_Value], datatypes: Collection[str], smallest: int) -> None:
        self._made = made
        self._datatypes = {name: BY_NAME[name] for name in datatypes}
        self._smallest = smallest

    def __call__(self, given: InferInput, raw: Buffer | None) -> _Value:
        """Make a tensor of one input of a request.

        Raises:
            InvalidRequest: the shape or element type cannot be held, or the values do not fit them.
        """
        shape = given.shape
        if any(size < self._smallest for size in shape):
            raise zero_dimension(given) if self._smallest else negative_dimension(given)
        datatype = self._datatypes.get(given.datatype)
        if datatype is None:
            wanted = ", ".join(sorted(self._datatypes))
            raise refused(PRECISION, f"Expected: {wanted}; Actual: {given.datatype}; input name: {given.name}")
        count = prod(shape)
        expected = count * datatype.itemsize
        if expected > MAX_BYTES:
            raise too_large(given)
        if raw is None:
            return self._made(datatype, to_array(given.contents, shape, count, described(given, datatype)))
        if len(raw) != expected:
            raise mismatch(CONTENT_SIZE, f"{expected} bytes", f"{len(raw)} bytes", described(given, datatype))
        return self._made(datatype, wrapped(raw, shape, datatype.numpy))


read_ov_tensor: Final = ArrayReader(OvTensor, NUMERIC_DATATYPES, 0)
read_mediapipe_tensor: Final = ArrayReader(MediaPipeTensor, MEDIAPIPE_DATATYPES, 1)
read_tf_tensor: Final = ArrayReader(TfTensor, NUMERIC_DATATYPES, 0)
