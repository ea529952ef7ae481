"""Encoder of TensorFlow Serving REST predict responses: ``predictions`` by rows, or ``outputs`` by columns.

A single output has no name.  BYTES are strings, or ``{"b64": text}`` if the output's name ends in ``_bytes`` or an
element is not UTF-8.  Floats are printed as the shortest text that reads back as the same number; NaN and infinities
are the bare words ``NaN``, ``Infinity`` and ``-Infinity``, as in TensorFlow Serving.
"""

from __future__ import annotations

from base64 import b64encode
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.tensor import RawTensor, from_bf16
from ovmstrio.encoding.json_output import array_pieces, read_raw
from ovmstrio.transport.http.responses import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import Tensor

__all__ = ["render_predict_answer"]

NOT_JSON: Final = "Response parsing to JSON error"

_BYTES_SUFFIX: Final = "_bytes"
_WORDS: Final = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}

Array = np.ndarray[Any, Any]


def render_predict_answer(response: InferResponse, *, by_rows: bool) -> HttpAnswer:
    """Encode a response; raise ``ModelFailure`` for row format if outputs lack a common batch dimension."""
    outputs = {output.name: _array(output) for output in response.outputs}
    pieces = [b'{"predictions":' if by_rows else b'{"outputs":', *(_by_rows if by_rows else _by_columns)(outputs), b"}"]
    return HttpAnswer(200, JSON_TYPE, b"".join(pieces))


def _array(output: Tensor | RawTensor) -> Array:
    """Return an output's elements: numbers, or the JSON form of BYTES."""
    tensor = read_raw(output) if isinstance(output, RawTensor) else output
    array = tensor.array
    if array.size == prod(output.shape):
        array = array.reshape(output.shape)
    if array.dtype.hasobject:
        return _texts(array, output.name)
    return from_bf16(array) if tensor.datatype.name == "BF16" else array


def _texts(array: Array, name: str) -> Array:
    shown = np.empty(array.size, object)
    elements = array.reshape(-1).tolist()
    try:
        texts = None if name.endswith(_BYTES_SUFFIX) else [element.decode() for element in elements]
    except UnicodeDecodeError:
        texts = None
    shown[:] = texts if texts is not None else [{"b64": b64encode(element).decode()} for element in elements]
    return shown.reshape(array.shape)


def _by_columns(outputs: dict[str, Array]) -> Iterator[bytes]:
    if len(outputs) == 1:
        (array,) = outputs.values()
        yield from _printed(array)
        return
    before = b"{"
    for name, array in outputs.items():
        yield before + orjson.dumps(name) + b":"
        yield from _printed(array)
        before = b","
    yield b"}" if outputs else b"{}"


def _printed(array: Array) -> Iterable[bytes]:
    return array_pieces(np.ascontiguousarray(array), _print) if array.ndim else [_print(array)]


def _print(array: Array) -> bytes:
    return orjson.dumps(_printable(array), option=orjson.OPT_SERIALIZE_NUMPY)


def _by_rows(outputs: dict[str, Array]) -> Iterable[bytes]:
    counts = {array.shape[:1] for array in outputs.values()}
    if len(counts) != 1 or () in counts:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise ModelFailure(
            f"{NOT_JSON} - row format requires outputs of equal batch size, use inputs instead of instances: {shapes}"
        )
    if len(outputs) == 1:
        (array,) = outputs.values()
        return _printed(array)
    rows = zip(*([_printable(row) for row in _rows(array)] for array in outputs.values()), strict=True)
    printed = [orjson.dumps(dict(zip(outputs, row, strict=True)), option=orjson.OPT_SERIALIZE_NUMPY) for row in rows]
    return [b"[", b",".join(printed), b"]"]


def _rows(array: Array) -> Sequence[Array]:
    return [array[number, ...] for number in range(len(array))]


def _printable(array: Array) -> Any:
    """Return a value that orjson prints as the elements in nested lists."""
    if array.dtype.hasobject:
        return array.tolist()
    if array.dtype.kind == "f":
        finite = np.isfinite(array)
        if not finite.all():
            return _with_words(array, array[~finite])
    # orjson does not print zero-dimensional arrays.
    return np.ascontiguousarray(array) if array.ndim else array[()]


def _with_words(array: Array, words: Array) -> orjson.Fragment:
    """Encode an array with non-finite numbers, which orjson prints as null."""
    printed = orjson.dumps(np.ascontiguousarray(array).reshape(array.shape or 1), option=orjson.OPT_SERIALIZE_NUMPY)
    if not array.ndim:
        printed = printed[1:-1]
    pieces = printed.split(b"null")
    printed_words = [_WORDS[word] for word in map(str, words.tolist())]
    return orjson.Fragment(
        b"".join(piece for pair in zip(pieces, [*printed_words, b""], strict=True) for piece in pair)
    )
