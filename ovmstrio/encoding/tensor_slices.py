"""Tensor fields of protobuf messages, parsed and written without the protobuf library and without copies.

::

    other fields | raw contents | raw contents
    └─ C parser ─┘ └── view ──┘   └── view ──┘
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

_MAX_FIELDS: Final = 16_384
"""Maximum number of fields of a message: a field takes two bytes on the wire and hundreds as an object."""

_VARINT: Final = 0
_DELIMITED: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}

_CONTINUATION_BIT: Final = 128
_VARINT_BITS: Final = 70


def write_varint(value: int) -> bytes:
    """Encode a varint without a cache, for numbers that rarely repeat."""
    octets = bytearray()
    while value >= _CONTINUATION_BIT:
        octets.append(value & 127 | _CONTINUATION_BIT)
        value >>= 7
    octets.append(value)
    return bytes(octets)


encode_varint = lru_cache(maxsize=1024)(write_varint)
"""Cached :func:`write_varint`, for numbers such as sizes."""


def delimited(tag: bytes, value: Buffer) -> tuple[bytes, Buffer]:
    """Return the prefix of a field (its tag and size) and its value."""
    return tag + encode_varint(len(value)), value


def split_raw_contents(data: Buffer, raw_tag: int, message: str) -> tuple[bytes, list[Buffer | None]]:
    """Split a message into its other fields and views of its raw contents, the fields with ``raw_tag``.

    Raises:
        IndexError: a field exceeds the message, or has an unsupported wire type.
        InvalidRequest: the message has too many fields.
    """
    view = memoryview(data)
    head: list[memoryview] = []
    raw: list[Buffer | None] = []
    position = kept = fields = 0
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        position, end = _value_bounds(data, tag & 7, position)
        fields += 1
        if fields > _MAX_FIELDS:
            raise InvalidRequest(f"{message}: expected at most {_MAX_FIELDS} fields, got more")
        if tag == raw_tag:
            head.append(view[kept:start])
            raw.append(view[position:end])
            kept = end
        position = end
    head.append(view[kept:])
    return b"".join(head), raw


def _value_bounds(data: Buffer, wire_type: int, position: int) -> tuple[int, int]:
    if wire_type == _VARINT:
        end = _read_varint(data, position)[1]
    elif wire_type == _DELIMITED:
        length, position = _read_varint(data, position)
        end = position + length
    else:
        end = position + _FIXED_SIZES.get(wire_type, len(data))
    if end > len(data):
        raise IndexError
    return position, end


def _read_varint(data: Buffer, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < _VARINT_BITS:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < _CONTINUATION_BIT:
            return value, position
        shift += 7
    raise IndexError
