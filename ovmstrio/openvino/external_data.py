"""External data of ONNX models: tensors whose values are in other files.

The files must be in the model's folder.  A location that leads elsewhere would let a model that a client uploads read
the server's files as weights.  OpenVINO checks locations only when it reads a model by its path, and takes the location
``*/_ORT_MEM_ADDR_/*`` for an address in its own memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.texts import cut
from ovmstrio.openvino.wire_format import wire_fields
from ovmstrio.util.regular_files import check_regular, open_regular

__all__ = ["check_external_data"]

_SUFFIX: Final = ".onnx"
_KEY: Final = b"location"
"""The key of a location; a file without these bytes has no external data."""
_EXPECTED: Final = "a relative path below the folder"
_PIECE_BYTES: Final = 2**20
_IN_MEMORY: Final = "_ORT_MEM_ADDR_"
_MAX_DEPTH: Final = 100
_MAX_FIELDS: Final = 10_000_000

# Messages of onnx.proto, with the fields that lead to tensors (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _FUNCTION, _TRAINING, _SPARSE, _TENSOR = range(8)
_CHILDREN: Final[Mapping[int, Mapping[int, int]]] = {
    _MODEL: {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}
_TENSOR_NAME: Final = 8
_TENSOR_EXTERNAL_DATA: Final = 13
_TENSOR_DATA_LOCATION: Final = 14
_ENTRY_KEY: Final = 1
_ENTRY_VALUE: Final = 2
_EXTERNAL: Final = 1


@dataclass(frozen=True, slots=True)
class _ExternalTensor:
    """A tensor's name and entries of ``external_data``.

    ``is_external`` is False if the tensor has its values in the model, and the entries have no effect.
    """

    name: str
    entries: tuple[tuple[str, str], ...]
    is_external: bool

    def values(self, key: str) -> list[str]:
        return [value for found, value in self.entries if found == key]


def check_external_data(file: Path) -> bool:
    """Check that the external data of an ONNX model is in the model's folder and complete; blocking.

    Files of other formats pass.  The format is that of the content, as it is for OpenVINO, and not that of the suffix.

    Returns:
        Whether the model has external data.

    Raises:
        ConfigError: a location leads out of the folder or to no regular file, the file of a tensor is too short, or the
            file's suffix is ``.onnx`` and it cannot be parsed.
        OSError: the file cannot be read.
    """
    tensors = _external_tensors(file)
    folder = file.parent
    problems = [problem for tensor in tensors for problem in _problems_of(tensor, folder)]
    if problems:
        raise ConfigError([replace(problem, file=str(file)) for problem in problems])
    return bool(tensors)


def _external_tensors(file: Path) -> list[_ExternalTensor]:
    with open_regular(file) as opened:
        if not _has_key(opened):
            return []
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            return _parsed(view, file)


def _has_key(opened: BinaryIO) -> bool:
    """Search a file for the key of a location, in pieces, for a search holds the interpreter's lock."""
    rest = b""
    while piece := opened.read(_PIECE_BYTES):
        if _KEY in rest + piece:
            return True
        rest = piece[-len(_KEY) :]
    return False


def _parsed(view: memoryview, file: Path) -> list[_ExternalTensor]:
    try:
        return list(_walk(view))
    except ValueError as error:
        reason = str(error)
    # Raised here, for the traceback of the first error has views of the file, which could not be closed.
    if file.suffix.lower() == _SUFFIX:
        raise ConfigError([Problem(f"the file is no ONNX model: {reason}", str(file))])
    return []


def _walk(model: memoryview) -> Iterator[_ExternalTensor]:
    waiting = [(_MODEL, model, 0)]
    count = 0
    while waiting:
        kind, message, depth = waiting.pop()
        if kind == _TENSOR:
            tensor = _read_tensor(message)
            if tensor.entries:
                yield tensor
            continue
        if depth > _MAX_DEPTH:
            raise ValueError("messages are nested too deeply")
        children = _CHILDREN[kind]
        for field in wire_fields(message):
            count += 1
            if count > _MAX_FIELDS:
                raise ValueError(f"more than {_MAX_FIELDS} fields")
            child = children.get(field.number)
            if child is not None and isinstance(field.value, memoryview):
                waiting.append((child, field.value, depth + 1))


def _read_tensor(message: memoryview) -> _ExternalTensor:
    name, entries, is_external = "", [], False
    for field in wire_fields(message):
        if field.number == _TENSOR_DATA_LOCATION and isinstance(field.value, int):
            is_external = field.value == _EXTERNAL
        elif not isinstance(field.value, memoryview):
            continue
        elif field.number == _TENSOR_NAME:
            name = bytes(field.value[:_MAX_DEPTH]).decode(errors="replace")
        elif field.number == _TENSOR_EXTERNAL_DATA:
            entries.append(_read_entry(field.value))
    return _ExternalTensor(name, tuple(entries), is_external)


def _read_entry(message: memoryview) -> tuple[str, str]:
    texts = {_ENTRY_KEY: "", _ENTRY_VALUE: ""}
    for field in wire_fields(message):
        if field.number in texts and isinstance(field.value, memoryview):
            texts[field.number] = bytes(field.value).decode("utf-8", "surrogateescape")
    return texts[_ENTRY_KEY], texts[_ENTRY_VALUE]


def _problems_of(tensor: _ExternalTensor, folder: Path) -> Iterator[Problem]:
    subject = f'external data of tensor "{cut(tensor.name, 80)}"'
    locations = tensor.values("location")
    if tensor.is_external and not locations:
        yield Problem(f"{subject}: the location is missing", expected="a file in the model's folder")
    for location in locations:
        found = cut(location.encode("utf-8", "backslashreplace").decode(), 80)
        if not _is_inside(location, folder):
            yield Problem(f"{subject} is outside of the model's folder", expected=_EXPECTED, found=repr(found))
        elif tensor.is_external:
            try:
                check_regular(folder / location)
                size = (folder / location).stat().st_size
            except OSError as error:
                yield Problem(f"{subject}: {found} cannot be read: {error.strerror}")
                continue
            begin, length = _number(tensor, "offset"), _number(tensor, "length")
            if begin is None or length is None:
                others = (f"{key} {value!r}" for key, value in tensor.entries if key != "location")
                entries = cut(", ".join(others), 80)
                yield Problem(
                    f"{subject}: the extent is no number", expected="offset and length in bytes", found=entries
                )
            elif begin + length > size:
                yield Problem(
                    f"{subject}: {found} is too short", expected=f"{begin + length} bytes", found=f"{size} bytes"
                )


def _is_inside(location: str, folder: Path) -> bool:
    """Return whether a location is a plain relative path below a folder, with its links followed."""
    parts = location.split("/")
    if set(parts) & {"", ".."} or set(location) & {"\0", "\\"} or _IN_MEMORY in location or ":" in parts[0]:
        return False
    try:
        location.encode()
        return (folder / location).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _number(tensor: _ExternalTensor, key: str) -> int | None:
    """Return the value of a key, 0 without one; None if it is no number of bytes."""
    values = tensor.values(key) or ["0"]
    if any(not value.isascii() or not value.isdecimal() or len(value) > len(str(2**63)) for value in values):
        return None
    return max(map(int, values))
