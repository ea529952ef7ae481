"""The element types of tensors, under the names that KServe gives them.

One table joins the names that the wire, numpy and OpenVINO use for one type.  ``BF16`` has no numpy type: its
arrays are ``uint16`` and hold the bits.  ``BYTES`` arrays are of numpy's object type and hold ``bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BYTES", "BY_NAME", "BY_OPENVINO_NAME", "INVALID", "UINT8", "Datatype", "from_bf16", "to_bf16"]


@dataclass(frozen=True, slots=True)
class Datatype:
    """One element type.

    Attributes:
        name: KServe's name, such as ``FP32``.
        numpy: the dtype of arrays that hold it; ``object`` for ``BYTES``.
        itemsize: bytes an element takes on the wire; 0 for ``BYTES``, whose elements differ.
        openvino: OpenVINO's name, such as ``f32``.
        contents_field: the field of ``InferTensorContents`` that may carry it.  The protocol has none for ``FP16`` and
            ``BF16``; they come as the ``FP32`` numbers that are rounded to them.
    """

    name: str
    numpy: np.dtype[Any]
    itemsize: int
    openvino: str
    contents_field: str


def _row(name: str, numpy: str, openvino: str, contents_field: str) -> Datatype:
    dtype = np.dtype(numpy)
    return Datatype(name, dtype, 0 if dtype.hasobject else dtype.itemsize, openvino, contents_field)


BYTES: Final = _row("BYTES", "O", "string", "bytes_contents")
UINT8: Final = _row("UINT8", "u1", "u8", "uint_contents")
INVALID: Final = _row("INVALID", "O", "dynamic", "")
"""What metadata says of a tensor about whose type nothing is known: the inputs and outputs of graphs."""

_ALL: Final = (
    _row("BOOL", "?", "boolean", "bool_contents"),
    _row("INT8", "i1", "i8", "int_contents"),
    _row("INT16", "<i2", "i16", "int_contents"),
    _row("INT32", "<i4", "i32", "int_contents"),
    _row("INT64", "<i8", "i64", "int64_contents"),
    UINT8,
    _row("UINT16", "<u2", "u16", "uint_contents"),
    _row("UINT32", "<u4", "u32", "uint_contents"),
    _row("UINT64", "<u8", "u64", "uint64_contents"),
    _row("FP16", "<f2", "f16", "fp32_contents"),
    _row("BF16", "<u2", "bf16", "fp32_contents"),
    _row("FP32", "<f4", "f32", "fp32_contents"),
    _row("FP64", "<f8", "f64", "fp64_contents"),
    BYTES,
)

BY_NAME: Final[Mapping[str, Datatype]] = {row.name: row for row in _ALL}
"""Element types by KServe's names."""

BY_OPENVINO_NAME: Final[Mapping[str, Datatype]] = {row.openvino: row for row in _ALL}

_HALF: Final = 16
_BELOW_HALF: Final = 0x7FFF
_QUIET_BIT: Final = 0x40


def to_bf16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give the bits of the nearest ``BF16`` numbers, of two equally near ones of the even one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + _BELOW_HALF + ((bits >> _HALF) & 1)) >> _HALF
    # Rounding carries some NaNs over into the sign: they are cut instead, and kept NaNs by a bit of their own.
    return np.where(np.isnan(numbers), bits >> _HALF | _QUIET_BIT, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give the numbers that bits of ``BF16`` stand for, as ``float32``."""
    return (bits.astype(np.uint32) << _HALF).view(np.float32)
