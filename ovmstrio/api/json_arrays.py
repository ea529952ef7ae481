"""Arrays as JSON in pieces, so that whoever prints a large one lets others have the interpreter in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import orjson

__all__ = ["PIECE", "array_pieces"]

PIECE: Final = 16_384
"""Elements that are printed in well under a millisecond."""

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
