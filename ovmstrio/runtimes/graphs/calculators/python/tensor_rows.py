"""Tensors of pyovms as what goes between processes, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pyovms import HttpPayload, Tensor

__all__ = ["tensor_of", "tensor_row"]


def tensor_row(tensor: Tensor) -> list[Any]:
    """Give a tensor's name, shape, datatype and buffer, which is not copied; of a request its head, too."""
    array = np.asarray(tensor)
    if array.dtype.names is not None:
        array = np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")
    head = [list(tensor._head)] if isinstance(tensor, HttpPayload) else []  # noqa: SLF001 - pyovms's own for the server
    return [tensor.name, list(tensor.shape), tensor.datatype, array, *head]


def tensor_of(row: Iterable[Any]) -> Tensor:
    """Make a tensor over the buffer of a row.

    Raises:
        ValueError, TypeError: it is none.
    """
    name, shape, datatype, array, *heads = row
    if not (isinstance(name, str) and isinstance(datatype, str) and isinstance(array, np.ndarray)):
        raise TypeError("no tensor")
    for head in heads:
        return HttpPayload._received(name, array, tuple(head))  # noqa: SLF001 - pyovms's own for the server
    return Tensor._restored(name, array, tuple(map(int, shape)), datatype)  # noqa: SLF001 - pyovms's own for the server
