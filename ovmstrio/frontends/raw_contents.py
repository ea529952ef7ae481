"""Tensors as the packed bytes that KServe calls raw contents, the same on gRPC and in REST's binary extension."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ovmstrio.request import Buffer
    from ovmstrio.tensor import Tensor

__all__ = ["raw_contents"]

_pack_length = Struct("<I").pack


def raw_contents(tensor: Tensor) -> Buffer:
    """Give a tensor's elements in row-major order, little-endian and packed.

    Elements of ``BYTES`` stand each behind its length as a little-endian uint32, all of them whatever the rank.
    Other tensors are not copied if their array is contiguous: the buffer is then a view of it.
    """
    array = tensor.array
    if array.dtype.hasobject:
        return b"".join([part for element in array.flat for part in (_pack_length(len(element)), element)])
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data
