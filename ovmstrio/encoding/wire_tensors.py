"""Arrays to and from KServe's raw contents, as a client has them."""

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
    """Name the type that an array is sent as.

    Raises:
        InvalidRequest: KServe has no type for its dtype.
    """
    if array.dtype.kind in "OSU":
        return BYTES.name
    name = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise InvalidRequest(f"dtype {array.dtype} has no KServe datatype; convert it to one of {', '.join(BY_NAME)}")
    return name


def to_raw(array: Array, datatype: str) -> bytes:
    """Pack an array; floating-point arrays sent as ``BF16`` are rounded to the nearest."""
    if datatype == BYTES.name:
        elements = [each.encode() if isinstance(each, str) else bytes(each) for each in array.flat]
        return b"".join(part for each in elements for part in (_LENGTH.pack(len(each)), each))
    if datatype == "BF16" and array.dtype.kind == "f":
        array = to_bf16(array)
    return np.ascontiguousarray(array, BY_NAME[datatype].numpy).tobytes()


def raw_tensor(name: str, array: Array, datatype: str | None = None) -> RawTensor:
    """Give an array as it travels, by default as the type that its dtype says.

    Raises:
        InvalidRequest: KServe has no type for its dtype.
    """
    datatype = datatype or datatype_of(array)
    return RawTensor(name, datatype, array.shape, to_raw(array, datatype))


def from_raw(raw: bytes, datatype: str, shape: tuple[int, ...]) -> Array:
    """Unpack a tensor; ``BF16`` is widened to ``float32``.

    Raises:
        ValueError: the bytes are not a tensor of that type and shape.
    """
    if datatype == BYTES.name:
        return bytes_array(_split(raw), shape)
    array = np.frombuffer(raw, BY_NAME[datatype].numpy)
    if datatype == "BF16":
        array = from_bf16(array)
    return array.reshape(shape)


def bytes_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    """Give elements as an array of objects."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def _split(raw: bytes) -> list[bytes]:
    elements, position = [], 0
    while position < len(raw):
        start = position + _LENGTH.size
        position = start + int.from_bytes(raw[position:start], "little")
        if position > len(raw):
            raise ValueError("BYTES end within an element")
        elements.append(raw[start:position])
    return elements
