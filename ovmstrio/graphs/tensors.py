"""Conversion of request inputs to tensor packets (OpenVINO, MediaPipe, TensorFlow, images, Python).

Arrays are views of the request's bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Final, Generic, TypeVar

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.core.tensor import BY_NAME, BYTES, Datatype, TensorSpec
from ovmstrio.encoding.raw_contents import buffer_of, framed, wrapped
from ovmstrio.graphs.packets import ImageFrame, MediaPipeTensor, OvTensor, TensorValue, TfTensor
from ovmstrio.graphs.python_nodes.api import Tensor
from ovmstrio.models.request_errors import format_shape, input_mismatch, invalid_request
from ovmstrio.models.tensor_contents import bytes_elements, to_array

# Errors of inputs; the fixed parts of the messages are OVMS's

_MAX_BYTES: Final = 2**63 - 1
"""The largest size in bytes that a shape may declare."""

_CONTENT_SIZE_INVALID: Final = "Invalid content size of tensor proto"
_INPUT_FORMAT_INVALID: Final = "Inputs inside buffer does not match expected format."
_PRECISION_INVALID: Final = "Invalid input precision"
_SHAPE: Final = "Invalid input shape"


def input_spec(source: InferInput, datatype: Datatype) -> TensorSpec:
    """Return the spec of a graph input, taken from the request."""
    return TensorSpec(source.name, datatype, (), None)


def _negative_dimension_error(source: InferInput) -> InvalidRequest:
    shape = format_shape(source.shape)
    return invalid_request(_SHAPE, f"Negative dimension size is not acceptable: {shape}; input name: {source.name}")


def _zero_dimension_error(source: InferInput) -> InvalidRequest:
    shape = format_shape(source.shape)
    return invalid_request(
        _SHAPE, f"Negative or zero dimension size is not acceptable: {shape}; input name: {source.name}"
    )


def _too_large_error(source: InferInput) -> InvalidRequest:
    """Return the error for a shape whose size in bytes exceeds 64 bits."""
    detail = "Provided shape and datatype declare too large buffer."
    return invalid_request(
        _CONTENT_SIZE_INVALID, f"{detail} Shape: {format_shape(source.shape)}; input name: {source.name}"
    )


def _missing_contents_error(source: InferInput) -> InvalidRequest:
    return invalid_request(
        _CONTENT_SIZE_INVALID, f"Input does not have input tensor contents field; input name: {source.name}"
    )


# OpenVINO, MediaPipe and TensorFlow tensors

NUMERIC_DATATYPES: Final = frozenset(BY_NAME) - {BYTES.name}
MEDIAPIPE_DATATYPES: Final = frozenset({"FP32", "FP16", "INT32", "INT8", "UINT8", "BOOL"})
"""Datatypes of a ``MediaPipeTensor``."""

_Value = TypeVar("_Value", bound=TensorValue)


class _ArrayReader(Generic[_Value]):
    __slots__ = ("_datatypes", "_min_size", "_tensor_class")

    def __init__(self, tensor_class: type[_Value], datatypes: Collection[str], min_size: int) -> None:
        self._tensor_class = tensor_class
        self._datatypes = {name: BY_NAME[name] for name in datatypes}
        self._min_size = min_size

    def __call__(self, source: InferInput, raw: Buffer | None) -> _Value:
        shape = source.shape
        if any(size < self._min_size for size in shape):
            raise _zero_dimension_error(source) if self._min_size else _negative_dimension_error(source)
        datatype = self._datatypes.get(source.datatype)
        if datatype is None:
            wanted = ", ".join(sorted(self._datatypes))
            raise invalid_request(
                _PRECISION_INVALID, f"Expected: {wanted}; Actual: {source.datatype}; input name: {source.name}"
            )
        count = prod(shape)
        expected = count * datatype.itemsize
        if expected > _MAX_BYTES:
            raise _too_large_error(source)
        if raw is None:
            return self._tensor_class(datatype, to_array(source.contents, shape, count, input_spec(source, datatype)))
        if len(raw) != expected:
            raise input_mismatch(
                _CONTENT_SIZE_INVALID, f"{expected} bytes", f"{len(raw)} bytes", input_spec(source, datatype)
            )
        return self._tensor_class(datatype, wrapped(raw, shape, datatype.numpy))


read_ov_tensor: Final = _ArrayReader(OvTensor, NUMERIC_DATATYPES, 0)
read_mediapipe_tensor: Final = _ArrayReader(MediaPipeTensor, MEDIAPIPE_DATATYPES, 1)
read_tf_tensor: Final = _ArrayReader(TfTensor, NUMERIC_DATATYPES, 0)


# Images

_RANK: Final = 3
_INTEGER_CHANNELS: Final = frozenset({1, 3, 4})
_FLOAT_CHANNELS: Final = frozenset({1, 2, 4})

# FP16 and signed pixels keep their bits; the datatype is that of MediaPipe's image format.
_FORMATS: Final = {
    "UINT8": (BY_NAME["UINT8"], _INTEGER_CHANNELS),
    "INT8": (BY_NAME["UINT8"], _INTEGER_CHANNELS),
    "UINT16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "INT16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "FP16": (BY_NAME["UINT16"], _INTEGER_CHANNELS),
    "FP32": (BY_NAME["FP32"], _FLOAT_CHANNELS),
}


def read_image(source: InferInput, raw: Buffer | None) -> ImageFrame:
    """Return one request input as an image."""
    if raw is None:
        fixed = "Mediapipe execution failed. MP status"
        raise invalid_request(fixed, f"images must be in raw_input_contents; input name: {source.name}")
    shape = source.shape
    if len(shape) != _RANK:
        detail = f"Expected: (height,width,channels); Actual: {format_shape(shape)}; input name: {source.name}"
        raise invalid_request("Invalid input shape", detail)
    if any(size < 1 for size in shape):
        raise _zero_dimension_error(source)
    datatype = _pixels(source)
    expected = prod(shape) * datatype.itemsize
    if expected > _MAX_BYTES:
        raise _too_large_error(source)
    if len(raw) != expected:
        sizes = f"Actual: {len(raw)}; Expected: {expected}"
        raise invalid_request(
            _CONTENT_SIZE_INVALID, f"Invalid Mediapipe Image input buffer size. {sizes}; input name: {source.name}"
        )
    return ImageFrame(datatype, wrapped(raw, shape, datatype.numpy))


def _pixels(source: InferInput) -> Datatype:
    channels = source.shape[-1]
    known = _FORMATS.get(source.datatype)
    if known is None:
        detail = f"Expected: {', '.join(_FORMATS)}; Actual: {source.datatype}; input name: {source.name}"
        raise invalid_request(_INPUT_FORMAT_INVALID, detail)
    datatype, allowed = known
    if channels not in allowed:
        wanted = ", ".join(map(str, sorted(allowed)))
        detail = f"Expected channels of {source.datatype}: {wanted}; Actual: {channels}; input name: {source.name}"
        raise invalid_request(_INPUT_FORMAT_INVALID, detail)
    return datatype


# Python tensors

_KNOWN: Final = {name: row for name, row in BY_NAME.items() if name not in {"BYTES", "BF16"}}
_ITEMSIZES: Final = {name: row.itemsize for name, row in _KNOWN.items()}

create_python_tensor: Final = Tensor._from_request  # noqa: SLF001 - pyovms's constructor for the server
"""Create a tensor of ``(name, raw, shape, datatype)`` whose buffer is ``raw`` itself."""


def read_python_tensor(source: InferInput, raw: Buffer | None) -> Tensor:
    """Return one request input as a Python tensor; raw bytes are not copied."""
    if raw is None:
        return _from_contents(source)
    count = 1
    for size in source.shape:
        if size < 0:
            raise _negative_dimension_error(source)
        count *= size
    itemsize = _ITEMSIZES.get(source.datatype)
    if itemsize is not None and count * itemsize != len(raw):
        raise _wrong_size(source, count * itemsize, len(raw))
    return create_python_tensor(source.name, raw, source.shape, source.datatype)


def _wrong_size(source: InferInput, expected: int, actual: int) -> Exception:
    if expected > _MAX_BYTES:
        return _too_large_error(source)
    sizes = f"Actual: {actual}; Expected: {expected}"
    return invalid_request(
        _CONTENT_SIZE_INVALID, f"Invalid Python tensor buffer size. {sizes}; input name: {source.name}"
    )


def _from_contents(source: InferInput) -> Tensor:
    if any(size < 0 for size in source.shape):
        raise _negative_dimension_error(source)
    if source.datatype == BYTES.name:
        elements = bytes_elements(source, None, input_spec(source, BYTES))
        if not elements and 0 not in source.shape:
            raise _missing_contents_error(source)
        return create_python_tensor(source.name, framed(elements), source.shape, BYTES.name)
    datatype = _KNOWN.get(source.datatype)
    if datatype is None:
        rule = "custom datatypes are allowed only when raw_input_contents is used."
        raise invalid_request(_PRECISION_INVALID, f"Provided datatype is invalid, {rule} Datatype: {source.datatype!r}")
    count = prod(source.shape)
    if count * datatype.itemsize > _MAX_BYTES:
        raise _too_large_error(source)
    array = to_array(source.contents, source.shape, count, input_spec(source, datatype))
    return create_python_tensor(source.name, buffer_of(array), source.shape, source.datatype)


def tensor_bytes(tensor: Tensor) -> Buffer:
    """Return a tensor's bytes in C order; writable buffers are copied, because user code may refill them."""
    return tensor._frozen()._wire_bytes()  # noqa: SLF001 - pyovms's interface for the server
