"""Protobuf's wire format without a schema (https://protobuf.dev/programming-guides/encoding/).

The raw tensors of a message are parsed and written without the protobuf library and without copies::

    other fields | raw contents | raw contents
    └─ C parser ─┘ └── view ──┘   └── view ──┘
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

# ----------------------------------------------------------------------
# Fields
# ----------------------------------------------------------------------

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_GROUP: Final = 3
_END_GROUP: Final = 4
_FIXED32: Final = 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BITS: Final = 70
_LOW_BITS: Final = 0x7F
_CONTINUATION_BIT: Final = 0x80
_TAG_MASK: Final = 2**32 - 1
_INTEGER_MASK: Final = 2**64 - 1
_MAX_DEPTH: Final = 100
"""Recursion limit of protobuf's own parsers."""


class WireField(NamedTuple):
    """A field: its number, its value (None for a group), and the bytes of its tag and value."""

    number: int
    value: int | memoryview | None
    extent: memoryview


def wire_fields(data: bytes | memoryview) -> Iterator[WireField]:
    """Parse the fields of a message; values of strings and messages are views of ``data``.

    Raises:
        ValueError: the data is not a message.
    """
    try:
        yield from _read_fields(memoryview(data))
    except IndexError:
        raise ValueError("incomplete varint") from None


def _read_fields(view: memoryview) -> Iterator[WireField]:
    position = 0
    while position < len(view):
        start = position
        tag, position = _read_varint(view, position)
        kind, number = tag & 7, (tag & _TAG_MASK) >> 3
        value: int | memoryview | None
        if kind == _VARINT:
            value, position = _read_varint(view, position)
            value &= _INTEGER_MASK
        elif kind == _GROUP:
            value, position = None, _group_end(view, position, number)
        else:
            if kind == _BYTES:
                size, position = _read_varint(view, position)
            elif kind in _FIXED_SIZES:
                size = _FIXED_SIZES[kind]
            else:
                raise ValueError(f"unknown wire type {kind}")
            value, position = view[position : position + size], position + size
            if position > len(view):
                raise ValueError("a field is longer than the file")
        yield WireField(number, value, view[start:position])


def _read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after the integer; raise IndexError if it is incomplete."""
    value = shift = 0
    while shift < _VARINT_BITS:
        byte = data[position]
        position += 1
        value |= (byte & _LOW_BITS) << shift
        if byte < _CONTINUATION_BIT:
            return value, position
        shift += 7
    raise IndexError


def _group_end(data: memoryview, position: int, number: int) -> int:
    """Return the position after a group, including nested groups."""
    open_groups = [number]
    while open_groups:
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == _GROUP:
            open_groups.append((tag & _TAG_MASK) >> 3)
            if len(open_groups) > _MAX_DEPTH:
                raise ValueError("groups are nested too deeply")
        elif kind == _END_GROUP:
            if open_groups.pop() != (tag & _TAG_MASK) >> 3:
                raise ValueError("mismatched end of group")
        elif kind == _VARINT:
            _, position = _read_varint(data, position)
        elif kind == _BYTES:
            size, position = _read_varint(data, position)
            position += size
        elif kind in _FIXED_SIZES:
            position += _FIXED_SIZES[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")
        if position > len(data):
            raise ValueError("a field is longer than the file")
    return position


_FIRST_STRING_TAG: Final = 1 << 3 | _BYTES
_MAX_FIRST_BYTES: Final = 4096


def first_string_field(data: bytes | memoryview) -> bytes:
    """Return the value of protobuf field 1 if a message starts with it and it is short; otherwise empty."""
    if not data or data[0] != _FIRST_STRING_TAG:
        return b""
    length = shift = 0
    for position, byte in enumerate(data[1:4], 2):
        length |= (byte & _LOW_BITS) << shift
        shift += 7
        if byte < _CONTINUATION_BIT:
            return bytes(data[position : position + length]) if length <= _MAX_FIRST_BYTES else b""
    return b""


# ----------------------------------------------------------------------
# Raw tensors
# ----------------------------------------------------------------------

_MAX_FIELDS: Final = 16_384
"""Maximum number of fields of a message: a field takes two bytes on the wire and hundreds as an object."""


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
    elif wire_type == _BYTES:
        length, position = _read_varint(data, position)
        end = position + length
    else:
        end = position + _FIXED_SIZES.get(wire_type, len(data))
    if end > len(data):
        raise IndexError
    return position, end
