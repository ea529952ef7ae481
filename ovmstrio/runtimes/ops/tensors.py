"""Requests and tensors of the wire to arrays, and arrays to tensors; nothing that is read is ever executed."""

from __future__ import annotations

import io
import math
from typing import Any, Final, NamedTuple

import numpy as np

from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineTensor

__all__ = ["LOD_SUFFIX", "from_array", "to_array", "unpack"]

Ndarray = np.ndarray[Any, Any]

LOD_SUFFIX: Final = ".lod"
"""What follows a tensor's name in the name of its row offsets."""


class _Kind(NamedTuple):
    dtype: str
    field: str


_KINDS: Final = {
    0: _Kind("int64", "int64_data"),
    1: _Kind("float32", "float_data"),
    2: _Kind("int32", "int_data"),
    3: _Kind("float64", "float64_data"),
    4: _Kind("int16", "int_data"),
    5: _Kind("float16", "float_data"),
    6: _Kind("uint16", "uint32_data"),
    7: _Kind("uint8", "uint32_data"),
    8: _Kind("int8", "int_data"),
    9: _Kind("bool", "bool_data"),
}
_STRING: Final = 12
_NPY: Final = 13
_KIND_OF: Final = {np.dtype(kind.dtype): number for number, kind in _KINDS.items()}


def unpack(request: PipelineRequest) -> dict[str, Any]:
    """Give a request's values and tensors by their names; surplus values are ignored.

    Raises:
        ValueError: there are fewer values than keys, or a tensor is not what it says it is.
    """
    if len(request.values) < len(request.keys):
        raise ValueError(f"{len(request.keys)} keys, but only {len(request.values)} values")
    found: dict[str, Any] = dict(zip(request.keys, request.values, strict=False))
    for tensor in request.tensors:
        found[tensor.name] = to_array(tensor)
        if tensor.lod:
            found[tensor.name + LOD_SUFFIX] = np.array(tensor.lod, np.int32)
    return found


def to_array(tensor: PipelineTensor) -> Any:
    """Give what a tensor holds: an array, or a text.

    Raises:
        ValueError: the type is not known, or the elements do not fit type or shape.
    """
    if tensor.elem_type == _STRING:
        return "".join(tensor.str_data)
    if tensor.elem_type == _NPY:
        return np.load(io.BytesIO(tensor.byte_data), allow_pickle=False)
    kind = _KINDS.get(tensor.elem_type)
    if kind is None:
        raise ValueError(f"tensor {tensor.name} has elem_type {tensor.elem_type}, which is not supported")
    data = getattr(tensor, kind.field)
    if len(data) != math.prod(tensor.shape):
        shape = list(tensor.shape)
        raise ValueError(f"tensor {tensor.name} of shape {shape} has {len(data)} elements in {kind.field}")
    try:
        return np.array(data, kind.dtype).reshape(tuple(tensor.shape))
    except OverflowError as error:
        raise ValueError(f"tensor {tensor.name} has elements that are no {kind.dtype}: {error}") from error


def from_array(name: str, value: Any, lod: Any = None) -> PipelineTensor:
    """Make a tensor of an array, or of a list of texts.

    Raises:
        ValueError: no tensor can hold it.
    """
    offsets = [] if lod is None else np.asarray(lod).reshape(-1).tolist()
    if isinstance(value, list):
        return PipelineTensor(name=name, elem_type=_STRING, shape=[len(value)], lod=offsets, str_data=list(value))
    number = _KIND_OF.get(value.dtype.newbyteorder("="))
    if number is None:
        raise ValueError(f"no tensor can hold {name}, whose type is {value.dtype}")
    tensor = PipelineTensor(name=name, elem_type=number, shape=list(value.shape), lod=offsets)
    setattr(tensor, _KINDS[number].field, value.reshape(-1).tolist())
    return tensor
