"""What the header of a GGUF file tells: values by their keys.  Reads files only; needs no library."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufError", "read_header"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_MOST_KEYS: Final = 100_000
_MOST_BYTES: Final = 2**30


class GgufError(ValueError):
    """The file is no GGUF file, or damaged."""


def read_header(path: Path) -> dict[str, Any]:
    """Give the numbers and texts of the header; arrays, such as vocabularies, are left out; blocking.

    Raises:
        GgufError: as said there.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise GgufError("the file does not begin as GGUF files do")
        try:
            version, _, count = struct.unpack("<IQQ", _read(file, 20))
            if version not in _VERSIONS or count > _MOST_KEYS:
                raise GgufError(f"version {version} with {count} keys; versions 2 and 3 can be read")
            header = {}
            for _ in range(count):
                key = _text(file)
                value = _value(file, *struct.unpack("<I", _read(file, 4)))
                if value is not None:
                    header[key] = value
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise GgufError("the header of the file is damaged") from error
    return header


def _read(file: BinaryIO, size: int) -> bytes:
    if size > _MOST_BYTES:
        raise GgufError("the header of the file is damaged")
    data = file.read(size)
    if len(data) != size:
        raise GgufError("the file ends within its header")
    return data


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", _read(file, 8))
    return _read(file, size).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        form = f"<{_SCALARS[kind]}"
        return struct.unpack(form, _read(file, struct.calcsize(form)))[0]
    inner, count = struct.unpack("<IQ", _read(file, 12))
    if inner in _SCALARS:
        _read(file, count * struct.calcsize(_SCALARS[inner]))
    elif count > _MOST_BYTES:
        raise GgufError("the header of the file is damaged")
    else:
        for _ in range(count):
            _value(file, inner)
    return None
