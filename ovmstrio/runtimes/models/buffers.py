"""Arrays as the packed bytes that KServe calls raw contents, and arrays over such bytes."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any

import numpy as np

from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import Array

__all__ = ["buffer_of", "framed", "wrapped"]

_pack_length = Struct("<I").pack


def framed(elements: Iterable[bytes]) -> bytes:
    """Put each element behind its length as a little-endian uint32."""
    return b"".join([part for element in elements for part in (_pack_length(len(element)), element)])


def buffer_of(array: Array) -> Buffer:
    """Give an array's elements in row-major order, little-endian and packed; those of an object array framed.

    Nothing is copied if the array is contiguous: the buffer is then a view of it.
    """
    if array.dtype.hasobject:
        return framed(array.flat)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # A memoryview is cast several times faster than an array is viewed, but not if it is empty.
    return array.data.cast("B") if array.size else b""


def wrapped(raw: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make an array over bytes whose number fits; it is a copy only where they are not aligned."""
    array: Array = np.ndarray(shape, dtype, raw)
    return array if array.flags.aligned else array.copy()
