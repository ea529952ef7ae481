"""The fields of protobuf messages that hold tensors, found and written without the library, so that none is copied.

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
"""Fields that a large message may have: a field takes two bytes on the wire and hundreds as an object."""

_VARINT: Final = 0
_DELIMITED: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}

_CONTINUED: Final = 128
_VARINT_BITS: Final = 70


def write_varint(value: int) -> bytes:
    """Write a number of which no two are likely to be the same."""
    octets = bytearray()
    while value >= _CONTINUED:
        octets.append(value & 127 | _CONTINUED)
        value >>= 7
    octets.append(value)
    return bytes(octets)


encode_varint = lru_cache(maxsize=1024)(write_varint)
"""Write a number such as a size, and remember it."""


def delimited(tag: bytes, value: Buffer) -> tuple[bytes, Buffer]:
    """Give a field's value, and what stands before it: tag and size."""
    return tag + encode_varint(len(value)), value


def split_raw_contents(data: Buffer, raw_tag: int, message: str) -> tuple[bytes, list[Buffer | None]]:
    """Part a message into everything else and views of its raw contents, which have a tag of their own.

    Raises:
        IndexError: a field does not end inside the message or is of a kind that no message here has.
        InvalidRequest: it has more fields than any honest one.
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
    """Find where the value behind a tag begins and ends."""
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
        if byte < _CONTINUED:
            return value, position
        shift += 7
    raise IndexError
