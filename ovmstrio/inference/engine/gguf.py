"""Reader of GGUF headers, with a check that the file contains all tensor data.

Libraries that load the file do not check this: a truncated file loads and produces wrong output. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.util.regular_files import open_regular
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
# (elements per block, bytes per block) by ggml tensor type.
# fmt: off
_TYPES: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}
# fmt: on
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 2**20
_MAX_KEYS: Final = 100_000
_MAX_TENSORS: Final = 100_000
_MAX_KEY_BYTES: Final = 2**16 - 1
_MAX_TEXT_BYTES: Final = 2**26  # total
_MAX_ELEMENTS: Final = 4_000_000  # in all arrays; the largest vocabularies have less than a million
_MAX_DEPTH: Final = 4
_MAX_DIMENSIONS: Final = 8
_DAMAGED: Final = "the header of the file is damaged"


class GgufError(ValueError):
    """The file is not a GGUF file, or damaged."""


class _Tensor(NamedTuple):
    name: str
    offset: int
    size: int


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._elements = 0
        self._text_bytes = 0

    def values(self) -> tuple[dict[str, Any], int]:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise GgufError("not a GGUF file")
        version, tensors, count = self._unpack("<IQQ")
        if version not in _VERSIONS or count > _MAX_KEYS or tensors > _MAX_TENSORS:
            text = f"version {version} with {count} keys and {tensors} tensors"
            limits = f"versions 2 and 3 with at most {_MAX_KEYS} keys and {_MAX_TENSORS} tensors"
            raise GgufError(f"unsupported file: {text}; expected {limits}")
        values = {}
        for _ in range(count):
            key = self._text(_MAX_KEY_BYTES)
            value = self._value(self._unpack("<I")[0])
            if value is not None:
                values[key] = value
        return values, tensors

    def tensors(self, count: int, alignment: int) -> tuple[list[_Tensor], int]:
        tensors = [self._tensor(alignment) for _ in range(count)]
        return tensors, -(-self._position // alignment) * alignment

    def _tensor(self, alignment: int) -> _Tensor:
        name = self._text(_MAX_KEY_BYTES)
        (dimensions,) = self._unpack("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise GgufError(f'tensor "{cut(name, 80)}" has {dimensions} dimensions, expected at most {_MAX_DIMENSIONS}')
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        if kind not in _TYPES:
            raise GgufError(f'tensor "{cut(name, 80)}" has the unknown type {kind}')
        block, size = _TYPES[kind]
        if block > 1 and (not shape or shape[0] % block):
            raise GgufError(f'tensor "{cut(name, 80)}" has rows of {shape[:1]} elements, expected blocks of {block}')
        if offset % alignment:
            raise GgufError(f'tensor "{cut(name, 80)}" begins at {offset}, expected a multiple of {alignment}')
        return _Tensor(name, offset, math.prod(shape) // block * size)

    def _value(self, kind: int, depth: int = 0) -> Any:
        """Return a value; None for an array, which is skipped."""
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES)
        if kind != _ARRAY:
            return self._unpack(f"<{_SCALARS[kind]}")[0]
        inner, count = self._unpack("<IQ")
        if inner in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[inner]))
            return None
        self._elements += count
        if self._elements > _MAX_ELEMENTS or depth == _MAX_DEPTH or inner not in {_STRING, _ARRAY}:
            raise GgufError(_DAMAGED)
        for _ in range(count):
            if inner == _STRING:
                self._skip(self._unpack("<Q")[0])
            else:
                self._value(_ARRAY, depth + 1)
        return None

    def _text(self, max_bytes: int) -> str:
        (size,) = self._unpack("<Q")
        self._text_bytes += size
        if size > max_bytes or self._text_bytes > _MAX_TEXT_BYTES:
            raise GgufError(_DAMAGED)
        return self._take(size).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, size: int) -> bytes:
        begin = self._position
        self._skip(size)
        return self._data[begin : self._position]

    def _skip(self, size: int) -> None:
        self._position += size
        if self._position > len(self._data):
            raise GgufError("the file ends within its header")


def read_header(path: Path) -> dict[str, Any]:
    """Return the scalars and texts of a header, and check that all tensors are complete and disjoint. Blocks.

    Raises:
        GgufError: the file is not a GGUF file, damaged, or truncated.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < len(_MAGIC):
            raise GgufError("not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _checked(_Header(data), len(data))
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise GgufError(_DAMAGED) from error


def _checked(header: _Header, file_size: int) -> dict[str, Any]:
    values, count = header.values()
    alignment = values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise GgufError(f"{_ALIGNMENT} is {alignment}, expected an integer of 1 to {_MAX_ALIGNMENT}")
    tensors, begin = header.tensors(count, alignment)
    last = _Tensor("", 0, 0)
    for tensor in sorted(tensors, key=lambda each: each.offset):
        name = cut(tensor.name, 80)
        if tensor.offset < last.offset + last.size:
            raise GgufError(f'tensor "{name}" overlaps tensor "{cut(last.name, 80)}"')
        left = file_size - begin - tensor.offset
        if tensor.size > left:
            raise GgufError(f'tensor "{name}" is incomplete: expected {tensor.size} bytes, got {max(left, 0)}')
        if tensor.size:
            last = tensor
    return values
