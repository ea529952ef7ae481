"""The little of Paddle's program files that decides whether OpenVINO can read them: version and operations.

The files are protocol buffers (``ProgramDesc``); only the fields that are of use here are looked at, everything else
is kept byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["PaddleProgram", "fields", "read_program"]

_BLOCKS: Final = 1
_VERSION: Final = 4
_VERSION_NUMBER: Final = 1
_BLOCK_OPERATIONS: Final = 4
_OPERATION_TYPE: Final = 3

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT: Final = 10
_FIRST_READABLE: Final = 2_000_000
_LOW_BITS: Final = 0x7F
_MORE: Final = 0x80


@dataclass(frozen=True, slots=True)
class PaddleProgram:
    """A program: the version of Paddle that wrote it (1007000 is 1.7.0; 0 if it does not tell) and its operations."""

    content: bytes
    version: int
    operations: frozenset[str]

    def readable(self) -> bytes:
        """Give the file as OpenVINO takes it: one of an old version without its version."""
        if self.version >= _FIRST_READABLE:
            return self.content
        return b"".join(extent for number, _, extent in _spans(self.content) if number != _VERSION)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Read a number; give it and the position behind it."""
    value = 0
    for count, byte in enumerate(data[position : position + _LONGEST_VARINT]):
        value |= (byte & _LOW_BITS) << (7 * count)
        if byte < _MORE:
            return value, position + count + 1
    raise ValueError("a number does not end")


def _spans(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Give number, value and whole extent of each field of a message.

    Raises:
        ValueError: it is no message.
    """
    position = 0
    while position < len(data):
        start = position
        tag, position = _varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, position = _varint(data, position)
        else:
            if kind == _BYTES:
                size, position = _varint(data, position)
            elif kind in _FIXED_SIZES:
                size = _FIXED_SIZES[kind]
            else:
                raise ValueError(f"a field is of the unknown kind {kind}")
            value, position = data[position : position + size], position + size
            if position > len(data):
                raise ValueError("a field is longer than the file")
        yield tag >> 3, value, data[start:position]


def fields(data: bytes, number: int) -> Iterator[bytes]:
    """Give each value of a field that holds strings or messages.

    Raises:
        ValueError: the data is no message.
    """
    for found, value, _ in _spans(data):
        if found == number and isinstance(value, bytes):
            yield value


def read_program(content: bytes) -> PaddleProgram:
    """Read a program file.

    Raises:
        ValueError: the content is no program.
    """
    version = 0
    for message in fields(content, _VERSION):
        numbers = (value for number, value, _ in _spans(message) if number == _VERSION_NUMBER)
        version = next((value for value in numbers if isinstance(value, int)), 0)
    operations = frozenset(
        kind.decode()
        for block in fields(content, _BLOCKS)
        for operation in fields(block, _BLOCK_OPERATIONS)
        for kind in fields(operation, _OPERATION_TYPE)
    )
    if not operations:
        raise ValueError("it has no operations")
    return PaddleProgram(content, version, operations)
