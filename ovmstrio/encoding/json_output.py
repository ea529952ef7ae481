"""Arrays and texts as JSON in pieces, so that a thread that prints a large one lets the event loop run in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import numpy as np
import orjson

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES, RawTensor, Tensor, from_bf16
from ovmstrio.encoding.raw_contents import raw_contents, split_elements

# ----------------------------------------------------------------------
# Arrays and texts as JSON in pieces, so that a thread that prints a large one lets the event loop run in between
# ----------------------------------------------------------------------

PIECE: Final = 16_384
"""Elements that are printed in well under a millisecond."""

_SLICE: Final = 2**16
"""Characters that are printed in well under a millisecond."""

Array = np.ndarray[Any, Any]


def _print(array: Array) -> bytes:
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def array_pieces(array: Array, show: Callable[[Array], bytes] = _print) -> Iterator[bytes]:
    """Print an array as nested lists; the pieces joined are what ``show`` would print of the whole.

    Args:
        array: of numbers, C-contiguous, with one dimension at least.
        show: prints an array of at most :data:`PIECE` elements, or one row of more.
    """
    rows = len(array)
    if array.size <= PIECE or not rows:
        yield show(array)
        return
    size = array.size // rows
    yield b"["
    if size > PIECE and array.ndim > 1:
        for number in range(rows):
            yield b"," if number else b""
            yield from array_pieces(array[number], show)
    else:
        step = max(1, PIECE // size)
        for start in range(0, rows, step):
            yield b"," if start else b""
            yield show(array[start : start + step])[1:-1]
    yield b"]"


def text_pieces(text: str) -> Iterator[bytes]:
    """Print a text as JSON; the pieces joined are what ``orjson`` prints of the whole."""
    yield b'"'
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        try:
            printed = orjson.dumps(part)
        except orjson.JSONEncodeError:
            # Half of a surrogate pair, which only the standard library can write.
            printed = json.dumps(part).encode()
        yield printed[1:-1]
    yield b'"'


# ----------------------------------------------------------------------
# Elements of tensors as JSON: numbers, texts, and words for numbers that are not finite
# ----------------------------------------------------------------------

JSON_NUMBERS: Final = {name: row for name, row in BY_NAME.items() if row.contents_field and row is not BYTES}
"""Datatypes whose elements are numbers in JSON, by their names."""
_NON_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_HINT: Final = "request it as a binary tensor"
_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


def read_raw(tensor: RawTensor) -> Tensor:
    """Return the elements of a raw tensor as a one-dimensional tensor.

    ``BYTES`` content is split at its length prefixes; content without valid prefixes is one element.

    Raises:
        InvalidRequest: JSON has no form for the datatype, or the number of bytes does not fit the shape.
    """
    data = raw_contents(tensor)
    if tensor.datatype == BYTES.name:
        elements = split_elements(data)
        return Tensor(tensor.name, BYTES, _objects([bytes(data)] if elements is None else elements))
    datatype = JSON_NUMBERS.get(tensor.datatype)
    if datatype is None:
        raise InvalidRequest(
            f"output {tensor.name}: its datatype {tensor.datatype!r} cannot be written as JSON, only"
            f" {', '.join(JSON_NUMBERS)} and BYTES; {_HINT}"
        )
    if len(data) != prod(tensor.shape) * datatype.itemsize:
        raise InvalidRequest(
            f"output {tensor.name}: its {len(data)} bytes are not {tensor.datatype} elements of shape"
            f" {list(tensor.shape)}; {_HINT}"
        )
    array = np.frombuffer(data, datatype.numpy) if data else np.empty(0, datatype.numpy)
    return Tensor(tensor.name, datatype, array)


def _objects(elements: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def json_values(tensor: Tensor | RawTensor) -> Any:
    """Return the elements as a flat value that orjson prints.

    Raises:
        InvalidRequest: an element has no JSON form.
    """
    if isinstance(tensor, RawTensor):
        tensor = read_raw(tensor)
    return _printable(_flat(tensor), tensor)


def _flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    array = from_bf16(tensor.array) if tensor.datatype.name == "BF16" else tensor.array
    return np.ascontiguousarray(array).reshape(-1)


def _printable(flat: np.ndarray[Any, Any], tensor: Tensor) -> Any:
    if flat.dtype.hasobject:
        return [_text(element, tensor) for element in flat]
    if flat.dtype.kind == "f" and not (finite := np.isfinite(flat)).all():
        return _with_words(flat, finite)
    return flat


def _with_words(flat: np.ndarray[Any, Any], finite: np.ndarray[Any, Any]) -> list[float | str]:
    """Return the numbers as orjson prints them, with NaN and infinities as texts in place of null."""
    values: list[float | str] = orjson.loads(orjson.dumps(flat, option=_NUMPY))
    for place in np.flatnonzero(~finite).tolist():
        values[place] = _NON_FINITE[str(flat[place])]
    return values


def _text(element: bytes, tensor: Tensor) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output {tensor.name}: its BYTES are not UTF-8, which JSON cannot carry; ask for it as a binary tensor"
        ) from None


def json_pieces(tensor: Tensor | RawTensor) -> Iterator[bytes]:
    """Print the elements in pieces that each take less than a millisecond."""
    if isinstance(tensor, RawTensor):
        tensor = read_raw(tensor)
    flat = _flat(tensor)
    yield from array_pieces(flat, lambda piece: orjson.dumps(_printable(piece, tensor), option=_NUMPY))
