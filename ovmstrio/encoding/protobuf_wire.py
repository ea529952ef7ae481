"""Parser of protobuf messages without a schema (https://protobuf.dev/programming-guides/encoding/)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_GROUP: Final = 3
_END_GROUP: Final = 4
_FIXED32: Final = 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10
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
    view = memoryview(data)
    position = 0
    while position < len(view):
        start = position
        tag, position = _parse_varint(view, position)
        kind, number = tag & 7, (tag & _TAG_MASK) >> 3
        value: int | memoryview | None
        if kind == _VARINT:
            value, position = _parse_varint(view, position)
        elif kind == _GROUP:
            value, position = None, _group_end(view, position, number)
        else:
            if kind == _BYTES:
                size, position = _parse_varint(view, position)
            elif kind in _FIXED_SIZES:
                size = _FIXED_SIZES[kind]
            else:
                raise ValueError(f"unknown wire type {kind}")
            value, position = view[position : position + size], position + size
            if position > len(view):
                raise ValueError("a field is longer than the file")
        yield WireField(number, value, view[start:position])


def _parse_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after the integer."""
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & _LOW_BITS) << (7 * count)
        if byte < _CONTINUATION_BIT:
            return value & _INTEGER_MASK, position + count + 1
    raise ValueError("incomplete varint")


def _group_end(data: memoryview, position: int, number: int) -> int:
    """Return the position after a group, including nested groups."""
    open_groups = [number]
    while open_groups:
        tag, position = _parse_varint(data, position)
        kind = tag & 7
        if kind == _GROUP:
            open_groups.append((tag & _TAG_MASK) >> 3)
            if len(open_groups) > _MAX_DEPTH:
                raise ValueError("groups are nested too deeply")
        elif kind == _END_GROUP:
            if open_groups.pop() != (tag & _TAG_MASK) >> 3:
                raise ValueError("mismatched end of group")
        elif kind == _VARINT:
            _, position = _parse_varint(data, position)
        elif kind == _BYTES:
            size, position = _parse_varint(data, position)
            position += size
        elif kind in _FIXED_SIZES:
            position += _FIXED_SIZES[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")
        if position > len(data):
            raise ValueError("a field is longer than the file")
    return position
