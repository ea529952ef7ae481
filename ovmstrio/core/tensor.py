"""Tensors as values, and what a servable says of the tensors it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ANY_SIZE",
    "BYTES",
    "BY_NAME",
    "BY_OPENVINO_NAME",
    "INVALID",
    "UINT8",
    "Array",
    "Datatype",
    "Dim",
    "MemoryPlace",
    "RawTensor",
    "Tensor",
    "TensorSpec",
    "from_bf16",
    "to_bf16",
]

# ----------------------------------------------------------------------
# Tensors as values, and what a servable says of the tensors it takes and gives
# ----------------------------------------------------------------------

Array = np.ndarray[Any, Any]
"""An array of any type and shape."""


class Dim(NamedTuple):
    """The sizes that one dimension may have: ``low`` to ``high``, both included; ``high`` -1 means no bound."""

    low: int
    high: int

    @classmethod
    def fixed(cls, size: int) -> Dim:
        """Make a dimension of one size."""
        return cls(size, size)

    @property
    def is_fixed(self) -> bool:
        """Whether only one size is accepted."""
        return self.low == self.high

    def accepts(self, size: int) -> bool:
        """Tell whether a tensor may have this size here."""
        return self.low <= size and (self.high == -1 or size <= self.high)

    @property
    def reported(self) -> int:
        """The size that metadata shows: -1 for anything that is not fixed, ranges included (OVMS's rule)."""
        return self.low if self.low == self.high else -1

    def __str__(self) -> str:
        if self.is_fixed:
            return str(self.low)
        return "-1" if self.high == -1 and self.low <= 1 else f"[{self.low}~{'' if self.high == -1 else self.high}]"


_LENGTH_BYTES: Final = 4

ANY_SIZE = Dim(0, -1)
"""A dimension of any size."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a servable.

    ``batch_axis`` is the position of ``N`` in its layout, None where the layout has none; ``layout`` is the layout
    in which the caller sees the tensor, such as ``NHWC``, or empty.
    """

    name: str
    datatype: Datatype
    shape: tuple[Dim, ...]
    batch_axis: int | None = 0
    layout: str = ""

    @property
    def reported_shape(self) -> list[int]:
        """The shape as metadata shows it, with -1 for each dimension that is not fixed."""
        return [dim.reported for dim in self.shape]

    def __str__(self) -> str:
        return f"{self.datatype.name} [{','.join(map(str, self.shape))}]"


@dataclass(slots=True)
class Tensor:
    """A named array with the element type it has on the wire; nobody changes one.

    ``array`` has the dtype ``datatype.numpy`` and the tensor's shape: ``uint16`` bits for ``BF16``, an object array
    of ``bytes`` for ``BYTES``.
    """

    name: str
    datatype: Datatype
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def datatype_name(self) -> str:
        """What the element type is called on the wire."""
        return self.datatype.name

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, packed; of ``BYTES`` their own and those of their lengths."""
        array = self.array
        return sum(map(len, array.flat)) + _LENGTH_BYTES * array.size if array.dtype.hasobject else array.nbytes


class MemoryPlace(NamedTuple):
    """Where a tensor's bytes are that are not in the answer: a region that the client has registered."""

    region: str
    offset: int
    byte_size: int

    @property
    def parameters(self) -> dict[str, str | int]:
        """The place in the words of the protocol."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.byte_size,
        }


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A named buffer whose element type and shape are what user code says, whether or not they fit the bytes.

    ``datatype`` may be a name that KServe does not have.  With a ``place`` the bytes are there, and ``data`` is empty.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    place: MemoryPlace | None = None

    @property
    def datatype_name(self) -> str:
        """What the element type is called on the wire."""
        return self.datatype

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


# ----------------------------------------------------------------------
# The element types of tensors, under the names that KServe gives them
# ----------------------------------------------------------------------


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
