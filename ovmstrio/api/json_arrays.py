"""Arrays and texts as JSON in pieces, so that a thread that prints a large one lets the event loop run in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import orjson

__all__ = ["PIECE", "array_pieces", "text_pieces"]

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
