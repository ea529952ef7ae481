"""Requests and tensors of the wire to arrays, and arrays to tensors; nothing that is read is ever executed."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ovmstrio.ops.values import (
    ARRAYS,
    ChannelData,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
    product_number,
)

__all__ = [
    "LOD_SUFFIX",
    "NPY",
    "STRINGS",
    "ArrayTensor",
    "as_response",
    "from_array",
    "holds_arrays",
    "pack",
    "to_array",
    "unpack",
]

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
STRINGS: Final = 12
NPY: Final = 13
_KIND_OF: Final = {np.dtype(kind.dtype): number for number, kind in _KINDS.items()}


class ArrayTensor(PipelineTensor):
    """A tensor that is an array, and has the fields of the wire only for those who ask for them.

    Args:
        name: the tensor's name.
        array: what it holds, which nobody may change any more.
        elem_type: the number of its type, or that of an array file.
        lod: its row offsets.
    """

    __slots__ = ("array",)

    def __init__(self, name: str, array: Ndarray, elem_type: int = NPY, lod: list[int] | None = None) -> None:
        self.name = name
        self.array = array
        self.elem_type = elem_type
        self.shape = list(array.shape)
        self.lod = lod or []

    def __getattr__(self, name: str) -> Any:
        """Make a field that nobody has asked for yet."""
        kind = _KINDS.get(self.elem_type)
        made: Any
        if name == "byte_data":
            made = b"" if kind is not None else _file_of(self.array)
        elif name.endswith("_data"):
            made = self.array.reshape(-1).tolist() if kind is not None and kind.field == name else []
        else:
            raise AttributeError(name)
        setattr(self, name, made)
        return made


def _file_of(array: Ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


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
            found[tensor.name + LOD_SUFFIX] = _offsets(tensor.lod)
    return found


def _offsets(lod: list[int]) -> Ndarray:
    """Give row offsets as hooks get them: in two rows, or in one where their number is odd."""
    offsets = np.array(lod, np.int32)
    return offsets if len(lod) % 2 else offsets.reshape(2, -1)


def to_array(tensor: PipelineTensor) -> Any:
    """Give what a tensor holds: an array, which may be changed, or a text.

    Raises:
        ValueError: the type is not known, or the elements do not fit type or shape.
    """
    if isinstance(tensor, ArrayTensor):
        array = tensor.array
        return array if array.flags.writeable else array.copy()
    if tensor.elem_type == STRINGS:
        return "".join(tensor.str_data)
    if tensor.elem_type == NPY:
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


def from_array(name: str, value: Any, lod: Any = None, *, stays_array: bool = False) -> PipelineTensor:
    """Make a tensor of an array, or of a list of texts; with ``stays_array`` of a copy of the array, as it is.

    Raises:
        ValueError: no tensor can hold it.
    """
    offsets = [] if lod is None else np.asarray(lod).reshape(-1).tolist()
    if isinstance(value, list):
        return PipelineTensor(name=name, elem_type=STRINGS, shape=[len(value)], lod=offsets, str_data=list(value))
    number = _KIND_OF.get(value.dtype.newbyteorder("="))
    if number is None:
        raise ValueError(f"no tensor can hold {name}, whose type is {value.dtype}")
    if stays_array:
        return ArrayTensor(name, np.array(value), number, offsets)
    tensor = PipelineTensor(name=name, elem_type=number, shape=list(value.shape), lod=offsets)
    setattr(tensor, _KINDS[number].field, value.reshape(-1).tolist())
    return tensor


def holds_arrays(output: Mapping[str, Any]) -> bool:
    """Tell whether every value is an array, or a list of texts that is not empty."""
    for value in output.values():
        if not isinstance(value, np.ndarray) and not (isinstance(value, list) and _are_texts(value)):
            return False
    return True


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, str) for one in values)


def pack(data: ChannelData, *, as_tensors: bool = False) -> PipelineResponse:
    """Make the answer: arrays as numpy prints them in full, texts as they are, or arrays as tensors."""
    response = PipelineResponse(err_no=data.error_code, err_msg=data.error_info)
    if data.prod_error_code is not None:
        response.err_no, response.err_msg = product_number(data.prod_error_code), data.prod_error_info
    if response.err_no:
        return response
    output = data.parse()
    if data.datatype == ARRAYS:
        if as_tensors:
            _pack_tensors(response, output, stays_array=data.keeps_arrays)
        else:
            _pack_printed(response, output)
    else:
        _pack_texts(response, output)
    return response


def _pack_printed(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    with np.printoptions(threshold=sys.maxsize, legacy="1.25"):
        for name, value in output.items():
            response.keys.append(name)
            response.values.append(repr(value))


def _pack_tensors(response: PipelineResponse, output: Mapping[str, Any], *, stays_array: bool) -> None:
    for name, value in output.items():
        owner = name.removesuffix(LOD_SUFFIX)
        if owner == name or owner not in output:
            response.tensors.append(from_array(name, value, output.get(name + LOD_SUFFIX), stays_array=stays_array))


def _pack_texts(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    for name, value in output.items():
        if not isinstance(value, str):
            response.err_no = CustomExceptionCode.TYPE_ERROR.value
            response.err_msg = f"@DAGExecutor fetch var type must be str({type(value)})."
            return
        response.keys.append(name)
        response.values.append(value)


def as_response(packed: Any) -> PipelineResponse:
    """Give what a pack hook made as a value; it may be anything with the fields of the message.

    Raises:
        AttributeError, TypeError, ValueError: it is nothing of the kind.
    """
    if isinstance(packed, PipelineResponse):
        response = packed
    else:
        response = PipelineResponse(packed.err_no, packed.err_msg, list(packed.key), list(packed.value))
        response.tensors = list(packed.tensors)
    if type(response.err_no) is not int:
        response.err_no = product_number(response.err_no)
    for text in (response.err_msg, *response.keys, *response.values):
        if not isinstance(text, str):
            raise TypeError(f"keys, values and err_msg of an answer must be str, got {type(text).__name__}")
    return response
