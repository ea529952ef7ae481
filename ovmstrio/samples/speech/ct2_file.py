"""Reader of the tensors in a CTranslate2 ``model.bin``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array

__all__ = ["read"]

_VERSION: Final = 6
_SPECIFICATION: Final = "WhisperSpec"
_DTYPES: Final = (np.dtype("<f4"), np.dtype("i1"), np.dtype("<i2"), np.dtype("<i4"), np.dtype("<f2"))


class _Cursor:
    """Read position in the file's bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def number(self, form: str) -> int:
        """Read one little-endian number."""
        (value,) = struct.unpack_from(f"<{form}", self.content, self.position)
        self.position += struct.calcsize(f"<{form}")
        return int(value)

    def text(self) -> str:
        """Read a string: length, bytes, terminating zero."""
        length = self.number("H")
        raw = self.content[self.position : self.position + length - 1]
        self.position += length
        return raw.decode()

    def tensor(self) -> Array:
        """Read a tensor: shape, type, size, data."""
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = _DTYPES[self.number("B")]
        length = self.number("I")
        numbers = np.frombuffer(self.content, dtype, length // dtype.itemsize, self.position)
        self.position += length
        return numbers.reshape(shape)


def read(path: Path) -> Mapping[str, Array]:
    """Read every tensor of the file.

    Raises:
        ValueError: the file is not a Whisper model of this version of the format.
    """
    cursor = _Cursor(path.read_bytes())
    if cursor.number("I") != _VERSION or cursor.text() != _SPECIFICATION:
        raise ValueError(f"{path} is not a {_SPECIFICATION} file of version {_VERSION}")
    cursor.number("I")  # the revision of the specification
    return {cursor.text(): cursor.tensor() for _ in range(cursor.number("I"))}
