"""Tensors of Python nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from ovmstrio.graphs.python_nodes.api.exporting import Exporter, over_array, over_buffer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Tensor"]

_FORMATS: Final = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_DTYPES: Final = {datatype: np.dtype(code) for datatype, code in _FORMATS.items()}
_BYTE: Final = np.dtype("B")
_LONGS: Final = {("l", 4): "INT32", ("L", 4): "UINT32", ("l", 8): "INT64", ("L", 8): "UINT64"}
_DATATYPES: Final = {code: datatype for datatype, code in _FORMATS.items()} | {
    code: name for (code, size), name in _LONGS.items() if size == np.dtype(code).itemsize
}
_MISSING: Final[Any] = object()

_T = TypeVar("_T", bound="Tensor")


class Tensor(Exporter):
    """Name, shape and datatype over a buffer, which is not copied.

    ``bytes(tensor)``, ``memoryview(tensor)`` and ``np.asarray(tensor)`` read it.

    Args:
        name: name of the stream.
        data: object with the buffer protocol, such as ``bytes``, a numpy array or a tensor; alias ``buffer``.
        shape: shape sent in place of the buffer's shape; not checked against the data.
        datatype: datatype sent in place of the one of the buffer's format.

    Raises:
        TypeError: an argument has a wrong type, or the buffer holds Python objects.
    """

    __slots__ = ("_datatype", "_name", "_shape", "_source")

    _name: str
    _shape: tuple[int, ...]
    _datatype: str
    _source: Any

    def __new__(
        cls,
        name: str,
        data: Any = _MISSING,
        shape: Sequence[int] | None = None,
        datatype: str | None = None,
        *,
        buffer: Any = _MISSING,
    ) -> Self:
        """Create a tensor."""
        if data is _MISSING or buffer is not _MISSING:
            data = _one_of(data, buffer)
        kind = type(data)
        if kind is bytes:
            self = over_buffer(cls, len(data), _BYTE, data)
            self._shape, self._datatype = (len(data),), "UINT8"
        elif kind is np.ndarray and data.dtype.isnative and (known := _DATATYPES.get(data.dtype.char)):
            self = over_array(cls, data)
            self._shape, self._datatype = data.shape, known
        else:
            self = _of_any(cls, name, data)
        self._name = name if type(name) is str else _text("name", name)
        self._source = data
        if shape is not None:
            self._shape = _shape(name, shape)
        if datatype is not None:
            self._datatype = datatype if type(datatype) is str else _text(f"datatype of {name!r}", datatype)
        return self

    @classmethod
    def _from_request(cls, name: str, raw: Any, shape: tuple[int, ...], datatype: str) -> Self:
        """Create a tensor of a request; the size of ``raw`` must match a known datatype."""
        dtype = _DTYPES.get(datatype)
        self = over_buffer(cls, len(raw), _BYTE, raw) if dtype is None else over_buffer(cls, shape, dtype, raw)
        self._name = name
        self._shape = shape
        self._datatype = datatype
        self._source = None
        return self

    @classmethod
    def _restored(cls, name: str, array: np.ndarray[Any, Any], shape: tuple[int, ...], datatype: str) -> Self:
        """Create a tensor received from another process; the array must not change."""
        self = over_array(cls, array)
        self._name = name
        self._shape = shape
        self._datatype = datatype
        self._source = None
        return self

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Given shape, or the buffer's shape."""
        return self._shape

    @property
    def datatype(self) -> str:
        """Given datatype, or the datatype of the buffer's format, or the format itself."""
        return self._datatype

    @property
    def data(self) -> memoryview:
        """Buffer with its shape and format."""
        return memoryview(self)

    @property
    def size(self) -> int:
        """Size of the buffer in bytes."""
        return memoryview(self).nbytes

    @property
    def ref_obj(self) -> Any:
        """Source object of the tensor; None for a tensor of a request."""
        return self._source

    def _wire_bytes(self) -> bytes | memoryview:
        """Return the elements in C order, as a view if they are contiguous."""
        if type(self._source) is bytes:
            return self._source
        view = memoryview(self)
        if not view.nbytes:
            return b""
        return np.frombuffer(view, np.uint8).data if view.c_contiguous else view.tobytes()

    def _frozen(self) -> Tensor:
        """Return this tensor, or a copy if its source is writable."""
        source = self._source
        while isinstance(source, Tensor):
            source = source.ref_obj
        if source is None or type(source) is bytes or memoryview(source).readonly:
            return self
        array = np.array(self)
        array.setflags(write=False)
        return Tensor(self._name, array, self._shape, self._datatype)


def _one_of(data: Any, buffer: Any) -> Any:
    if (data is _MISSING) == (buffer is _MISSING):
        how_many = "none" if data is _MISSING else "both"
        raise TypeError(f"Tensor() takes either data or buffer, got {how_many}")
    return buffer if data is _MISSING else data


def _of_any(cls: type[_T], name: Any, data: Any) -> _T:
    view = _view_of(name, data)
    code, size = view.format, view.itemsize
    if "O" in code:
        raise TypeError(
            f"Tensor {name!r}: the array holds Python objects, which cannot be sent; use a dtype such as "
            "np.float32 or, for text, np.str_"
        )
    if code == "B" and view.ndim == 1 and view.c_contiguous:
        self = over_buffer(cls, len(view), _BYTE, view)
    else:
        self = over_array(cls, _array_of(view))
    self._shape = view.shape or ()
    self._datatype = _LONGS.get((code, size)) or _DATATYPES.get(code, code)
    return self


def _view_of(name: Any, data: Any) -> memoryview:
    try:
        return memoryview(data)
    except TypeError:
        hint = "; use text.encode()" if isinstance(data, str) else "; try np.array(...)"
        raise TypeError(
            f"Tensor {name!r}: data must have the buffer protocol, as bytes and numpy arrays do, "
            f"got {type(data).__name__}{hint}"
        ) from None


def _array_of(view: memoryview) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(view)
    except (ValueError, NotImplementedError, RuntimeError, TypeError):
        # numpy does not know the format, but its bytes can be sent.
        return np.frombuffer(view.tobytes(), np.uint8)


_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1


def _shape(name: Any, shape: Any) -> tuple[int, ...]:
    try:
        if not isinstance(shape, str | bytes) and len(shape) >= 0:
            sizes: tuple[int, ...] = tuple(each.__index__() for each in shape)
            if all(_INT64_MIN <= size <= _INT64_MAX for size in sizes):
                return sizes
    except (TypeError, AttributeError):
        pass
    raise TypeError(f"Tensor {name!r}: shape must be a sequence of 64-bit integers, got {shape!r}")


def _text(what: str, value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"Tensor: {what} must be text, got {type(value).__name__}")
