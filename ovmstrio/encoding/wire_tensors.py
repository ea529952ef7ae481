"""Conversion between arrays and raw contents, for clients."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES, Array, RawTensor, from_bf16, to_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH: Final = struct.Struct("<I")
_BY_DTYPE: Final = {row.numpy: row.name for row in BY_NAME.values() if row.name not in {"BF16", "BYTES"}}


def datatype_of(array: Array) -> str:
    """Return the KServe datatype of an array.

    Raises:
        InvalidRequest: KServe has no datatype for the dtype.
    """
    if array.dtype.kind in "OSU":
        return BYTES.name
    name = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise InvalidRequest(f"dtype {array.dtype} has no KServe datatype; convert it to one of {', '.join(BY_NAME)}")
    return name


def to_raw(array: Array, datatype: str) -> bytes:
    """Encode an array as raw contents; floats are rounded to the nearest ``BF16``."""
    if datatype == BYTES.name:
        elements = [each.encode() if isinstance(each, str) else bytes(each) for each in array.flat]
        return b"".join(part for each in elements for part in (_LENGTH.pack(len(each)), each))
    if datatype == "BF16" and array.dtype.kind == "f":
        array = to_bf16(array)
    return np.ascontiguousarray(array, BY_NAME[datatype].numpy).tobytes()


def raw_tensor(name: str, array: Array, datatype: str | None = None) -> RawTensor:
    """Create a raw tensor of an array, by default with the datatype of its dtype.

    Raises:
        InvalidRequest: KServe has no datatype for the dtype.
    """
    datatype = datatype or datatype_of(array)
    return RawTensor(name, datatype, array.shape, to_raw(array, datatype))


def from_raw(raw: bytes, datatype: str, shape: tuple[int, ...]) -> Array:
    """Decode raw contents to an array; ``BF16`` becomes ``float32``.

    Raises:
        ValueError: the bytes do not fit the datatype and shape.
    """
    if datatype == BYTES.name:
        return bytes_array(_split(raw), shape)
    array = np.frombuffer(raw, BY_NAME[datatype].numpy)
    if datatype == "BF16":
        array = from_bf16(array)
    return array.reshape(shape)


def bytes_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    """Create an object array of elements."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def _split(raw: bytes) -> list[bytes]:
    elements, position = [], 0
    while position < len(raw):
        start = position + _LENGTH.size
        position = start + int.from_bytes(raw[position:start], "little")
        if position > len(raw):
            raise ValueError("BYTES element exceeds the contents")
        elements.append(raw[start:position])
    return elements
