"""Tensors, datatypes and tensor specifications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = np.ndarray[Any, Any]
"""An array of any shape and element type."""


class Dim(NamedTuple):
    """Allowed sizes of one dimension, ``low`` to ``high`` inclusive; ``high`` -1 means unbounded."""

    low: int
    high: int

    @classmethod
    def fixed(cls, size: int) -> Dim:
        """Return a dimension of fixed size."""
        return cls(size, size)

    @property
    def is_fixed(self) -> bool:
        """True if only one size is accepted."""
        return self.low == self.high

    def accepts(self, size: int) -> bool:
        """Return whether a tensor may have this size."""
        return self.low <= size and (self.high == -1 or size <= self.high)

    @property
    def reported(self) -> int:
        """Size in metadata: -1 unless fixed, also for ranges (as OVMS)."""
        return self.low if self.low == self.high else -1

    def __str__(self) -> str:
        if self.is_fixed:
            return str(self.low)
        return "-1" if self.high == -1 and self.low <= 1 else f"[{self.low}~{'' if self.high == -1 else self.high}]"


_LENGTH_BYTES: Final = 4

ANY_SIZE = Dim(0, -1)
"""A dimension that accepts every size."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a servable.

    ``batch_axis`` is the position of ``N`` in the layout, or None.  ``layout`` is that of the caller's tensor, such as
    ``NHWC``, or empty.
    """

    name: str
    datatype: Datatype
    shape: tuple[Dim, ...]
    batch_axis: int | None = 0
    layout: str = ""

    @property
    def reported_shape(self) -> list[int]:
        """Shape in metadata, with -1 for each dimension that is not fixed."""
        return [dim.reported for dim in self.shape]

    def __str__(self) -> str:
        return f"{self.datatype.name} [{','.join(map(str, self.shape))}]"


@dataclass(slots=True)
class Tensor:
    """A named immutable tensor.

    ``array`` has the dtype ``datatype.numpy`` and the tensor's shape: ``uint16`` bits for ``BF16``, an object array
    of ``bytes`` for ``BYTES``.
    """

    name: str
    datatype: Datatype
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def datatype_name(self) -> str:
        """Datatype name on the wire."""
        return self.datatype.name

    @property
    def nbytes(self) -> int:
        """Packed size in bytes; ``BYTES`` elements include their length prefix."""
        array = self.array
        return sum(map(len, array.flat)) + _LENGTH_BYTES * array.size if array.dtype.hasobject else array.nbytes


class SharedMemoryLocation(NamedTuple):
    """Location of an output in a registered shared-memory region."""

    region: str
    offset: int
    byte_size: int

    @property
    def parameters(self) -> dict[str, str | int]:
        """The location as KServe parameters."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.byte_size,
        }


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A named buffer with datatype and shape as set by user code, which may not match the buffer.

    ``datatype`` may be unknown to KServe.  With a ``place`` the bytes are in shared memory and ``data`` is empty.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    place: SharedMemoryLocation | None = None

    @property
    def datatype_name(self) -> str:
        """Datatype name on the wire."""
        return self.datatype

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


# Datatypes


@dataclass(frozen=True, slots=True)
class Datatype:
    """One element type.

    Attributes:
        name: KServe name, such as ``FP32``.
        numpy: array dtype; ``object`` for ``BYTES``.
        itemsize: bytes per element on the wire; 0 for ``BYTES``.
        openvino: OpenVINO name, such as ``f32``.
        contents_field: field of ``InferTensorContents``.  ``FP16`` and ``BF16`` have none and use ``fp32_contents``.
    """

    name: str
    numpy: np.dtype[Any]
    itemsize: int
    openvino: str
    contents_field: str


def _datatype(name: str, numpy: str, openvino: str, contents_field: str) -> Datatype:
    dtype = np.dtype(numpy)
    return Datatype(name, dtype, 0 if dtype.hasobject else dtype.itemsize, openvino, contents_field)


BYTES: Final = _datatype("BYTES", "O", "string", "bytes_contents")
UINT8: Final = _datatype("UINT8", "u1", "u8", "uint_contents")
INVALID: Final = _datatype("INVALID", "O", "dynamic", "")
"""Datatype of tensors without a known type: inputs and outputs of graphs."""

_DATATYPES: Final = (
    _datatype("BOOL", "?", "boolean", "bool_contents"),
    _datatype("INT8", "i1", "i8", "int_contents"),
    _datatype("INT16", "<i2", "i16", "int_contents"),
    _datatype("INT32", "<i4", "i32", "int_contents"),
    _datatype("INT64", "<i8", "i64", "int64_contents"),
    UINT8,
    _datatype("UINT16", "<u2", "u16", "uint_contents"),
    _datatype("UINT32", "<u4", "u32", "uint_contents"),
    _datatype("UINT64", "<u8", "u64", "uint64_contents"),
    _datatype("FP16", "<f2", "f16", "fp32_contents"),
    _datatype("BF16", "<u2", "bf16", "fp32_contents"),
    _datatype("FP32", "<f4", "f32", "fp32_contents"),
    _datatype("FP64", "<f8", "f64", "fp64_contents"),
    BYTES,
)

BY_NAME: Final[Mapping[str, Datatype]] = {row.name: row for row in _DATATYPES}
"""Datatypes by their KServe names, such as ``FP32``."""

BY_OPENVINO_NAME: Final[Mapping[str, Datatype]] = {row.openvino: row for row in _DATATYPES}

_HALF: Final = 16
_BELOW_HALF: Final = 0x7FFF
_QUIET_BIT: Final = 0x40


def to_bf16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of the nearest ``BF16`` numbers, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + _BELOW_HALF + ((bits >> _HALF) & 1)) >> _HALF
    # Rounding overflows some NaNs into the sign: NaNs are truncated and get the quiet bit.
    return np.where(np.isnan(numbers), bits >> _HALF | _QUIET_BIT, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``BF16`` bits as ``float32``."""
    return (bits.astype(np.uint32) << _HALF).view(np.float32)
