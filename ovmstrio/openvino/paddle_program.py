"""The little of Paddle's program files that decides whether OpenVINO can read them: version and operations.

The files are protocol buffers (``ProgramDesc``); only the fields that are of use here are looked at, everything else
is kept byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ovmstrio.openvino.wire_format import wire_fields

__all__ = ["PaddleProgram", "fields", "read_program", "variable_names"]

_BLOCKS: Final = 1
_VERSION: Final = 4
_VERSION_NUMBER: Final = 1
_BLOCK_VARIABLES: Final = 3
_VARIABLE_NAME: Final = 1
_BLOCK_OPERATIONS: Final = 4
_OPERATION_TYPE: Final = 3

_FIRST_READABLE: Final = 2_000_000


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
        return b"".join(field.extent for field in wire_fields(self.content) if field.number != _VERSION)


def fields(data: bytes, number: int) -> Iterator[bytes]:
    """Yield each value of a field that holds strings or messages.

    Raises:
        ValueError: the data is no message.
    """
    for field in wire_fields(data):
        if field.number == number and isinstance(field.value, memoryview):
            yield bytes(field.value)


def variable_names(data: bytes) -> Iterator[str]:
    """Yield the names of a program's variables.

    Raises:
        ValueError: the data is no program, or a name is not UTF-8.
    """
    for block in fields(data, _BLOCKS):
        for variable in fields(block, _BLOCK_VARIABLES):
            yield from (name.decode() for name in fields(variable, _VARIABLE_NAME))


def read_program(content: bytes) -> PaddleProgram:
    """Read a program file.

    Raises:
        ValueError: the content is no program.
    """
    version = 0
    for message in fields(content, _VERSION):
        numbers = (field.value for field in wire_fields(message) if field.number == _VERSION_NUMBER)
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
