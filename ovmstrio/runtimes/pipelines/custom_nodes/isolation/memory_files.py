"""A message as a file in memory: JSON, and arrays that the reader uses where they lie.

::

    length of the JSON (8 bytes, little-endian) | JSON | padding | array | padding | array ...

The JSON is ``[message, [[name, datatype, shape, offset], ...]]``; offsets count from the first array.  The writer lets
go of the file once it is sent, so the reader has the arrays for itself; it seals the file first, so that no writer gone
mad can take memory away that is in use.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import DATATYPES, PRECISIONS
from ovmstrio.work.processes import make_file, map_file

__all__ = ["Message", "read", "write"]

Ndarray = np.ndarray[Any, Any]
Message = dict[str, Any]

_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 64


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def write(message: Message, arrays: Mapping[str, Ndarray]) -> int:
    """Make a file of a message and copies of arrays, and give its descriptor.

    Raises:
        OSError: there is no memory, or no descriptor, left.
    """
    rows, end = [], 0
    for name, array in arrays.items():
        start = _aligned(end)
        rows.append((name, DATATYPES[PRECISIONS[array.dtype]].name, array.shape, start))
        end = start + array.nbytes
    text = orjson.dumps([message, rows])
    base = _aligned(_LENGTH_BYTES + len(text))

    def fill(mapped: mmap.mmap) -> None:
        head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        mapped[: len(head)] = head
        for (_, _, shape, start), array in zip(rows, arrays.values(), strict=True):
            np.ndarray(shape, array.dtype, mapped, base + start)[...] = array

    return make_file("custom-node-call", base + end, fill)


def read(file: int) -> tuple[Message, dict[str, Ndarray]]:
    """Give a message and its arrays, which keep the file's memory for as long as they live; closes the descriptor.

    Raises:
        ValueError: the file is no message.
        OSError: it cannot be mapped.
    """
    mapped = map_file(file)
    length = int.from_bytes(mapped[:_LENGTH_BYTES], "little")
    message, rows = orjson.loads(memoryview(mapped)[_LENGTH_BYTES : _LENGTH_BYTES + length])
    base = _aligned(_LENGTH_BYTES + length)
    return message, {name: _array(mapped, kind, shape, base + start) for name, kind, shape, start in rows}


def _array(mapped: mmap.mmap, kind: str, shape: list[int], start: int) -> Ndarray:
    dtype = BY_NAME[kind].numpy
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(mapped, dtype, count, start).reshape(shape)
