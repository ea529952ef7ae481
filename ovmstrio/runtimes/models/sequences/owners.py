"""Whose a sequence is where several servers share them by their ids, and what is told on the way to whoever has one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.core.texts import utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ovmstrio.core.tensor import Array

__all__ = ["owner_of", "pack", "read_outputs", "tell_outputs", "unpack"]

_ID_BYTES: Final = 8


def owner_of(identity: int | str, owners: int) -> int:
    """Tell which of so many has a sequence; the same whoever is asked, and whenever."""
    data = utf8(identity) if isinstance(identity, str) else identity.to_bytes(_ID_BYTES, "little")
    return crc32(data) % owners


def pack(arrays: Iterable[tuple[str, str, Array]]) -> tuple[list[Any], list[Any]] | None:
    """Give what :func:`unpack` makes arrays of again, with what is told of each; None if one has objects.

    Args:
        arrays: names, what else is told of them, and what they are.
    """
    heads, buffers = [], []
    for name, told, array in arrays:
        if array.dtype.hasobject:
            return None
        heads.append([name, told, array.dtype.str, array.shape])
        buffers.append(array.tobytes())
    return heads, buffers


def unpack(heads: Sequence[Sequence[Any]], tail: Any) -> Iterator[tuple[str, str, Array]]:
    """Make names, what is told and arrays of what :func:`pack` gave.

    Raises:
        ValueError: there are fewer bytes than there should be.
    """
    at = 0
    for name, told, kind, shape in heads:
        dtype = np.dtype(kind)
        count = math.prod(shape)
        # Copies are aligned, and may be written.
        yield (
            name,
            told,
            np.frombuffer(tail, dtype, count, at).reshape(shape).copy() if count else np.empty(shape, dtype),
        )
        at += count * dtype.itemsize


def tell_outputs(outputs: Sequence[Tensor | RawTensor]) -> list[list[Any]]:
    """Make plain data of a model's outputs."""
    return [[each.name, each.datatype_name, each.array] for each in outputs if isinstance(each, Tensor)]


def read_outputs(told: Sequence[Sequence[Any]]) -> list[Tensor | RawTensor]:
    """Make outputs of what :func:`tell_outputs` gave."""
    return [Tensor(name, BY_NAME[datatype], np.asarray(array)) for name, datatype, array in told]
