"""JSON output of arrays, texts and tensors in pieces, so that a thread releases the GIL between pieces."""

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
# Arrays and texts
# ----------------------------------------------------------------------

PIECE: Final = 16_384
"""Elements that are encoded in well under a millisecond."""

_SLICE: Final = 2**16
"""Characters that are encoded in well under a millisecond."""

Array = np.ndarray[Any, Any]


def _encode(array: Array) -> bytes:
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def array_pieces(array: Array, show: Callable[[Array], bytes] = _encode) -> Iterator[bytes]:
    """Encode an array as nested lists; the joined pieces equal ``show(array)``.

    Args:
        array: C-contiguous numbers with at least one dimension.
        show: encodes an array of at most :data:`PIECE` elements, or one larger row.
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
    """Encode a text as JSON; the joined pieces equal the output of ``orjson``."""
    yield b'"'
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        try:
            encoded = orjson.dumps(part)
        except orjson.JSONEncodeError:
            # Only the standard library can encode an unpaired surrogate.
            encoded = json.dumps(part).encode()
        yield encoded[1:-1]
    yield b'"'


# ----------------------------------------------------------------------
# Tensors: numbers, texts, and strings for numbers that are not finite
# ----------------------------------------------------------------------

JSON_NUMBERS: Final = {name: row for name, row in BY_NAME.items() if row.contents_field and row is not BYTES}
"""Datatypes whose elements are JSON numbers, by name."""
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
            f"output {tensor.name}: datatype {tensor.datatype!r} cannot be written as JSON, expected one of"
            f" {', '.join(JSON_NUMBERS)}, BYTES; {_HINT}"
        )
    if len(data) != prod(tensor.shape) * datatype.itemsize:
        raise InvalidRequest(
            f"output {tensor.name}: expected {tensor.datatype} elements of shape {list(tensor.shape)},"
            f" got {len(data)} bytes; {_HINT}"
        )
    array = np.frombuffer(data, datatype.numpy) if data else np.empty(0, datatype.numpy)
    return Tensor(tensor.name, datatype, array)


def _objects(elements: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def json_values(tensor: Tensor | RawTensor) -> Any:
    """Return the elements as a flat value that orjson can encode.

    Raises:
        InvalidRequest: an element has no JSON form.
    """
    if isinstance(tensor, RawTensor):
        tensor = read_raw(tensor)
    return _encodable(_flat(tensor), tensor)


def _flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    array = from_bf16(tensor.array) if tensor.datatype.name == "BF16" else tensor.array
    return np.ascontiguousarray(array).reshape(-1)


def _encodable(flat: np.ndarray[Any, Any], tensor: Tensor) -> Any:
    if flat.dtype.hasobject:
        return [_text(element, tensor) for element in flat]
    if flat.dtype.kind == "f" and not (finite := np.isfinite(flat)).all():
        return _replace_non_finite(flat, finite)
    return flat


def _replace_non_finite(flat: np.ndarray[Any, Any], finite: np.ndarray[Any, Any]) -> list[float | str]:
    """Return the numbers as orjson encodes them, with NaN and infinities as strings instead of null."""
    values: list[float | str] = orjson.loads(orjson.dumps(flat, option=_NUMPY))
    for place in np.flatnonzero(~finite).tolist():
        values[place] = _NON_FINITE[str(flat[place])]
    return values


def _text(element: bytes, tensor: Tensor) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"output {tensor.name}: its BYTES are not UTF-8, as JSON requires; {_HINT}") from None


def json_pieces(tensor: Tensor | RawTensor) -> Iterator[bytes]:
    """Encode the elements in pieces that each take less than a millisecond."""
    if isinstance(tensor, RawTensor):
        tensor = read_raw(tensor)
    flat = _flat(tensor)
    yield from array_pieces(flat, lambda piece: orjson.dumps(_encodable(piece, tensor), option=_NUMPY))
