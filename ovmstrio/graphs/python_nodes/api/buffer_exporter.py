"""Read-only buffer exporter over an array (PEP 688)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Exporter", "over_array", "over_buffer"]

_E = TypeVar("_E", bound="Exporter")


class Exporter:
    """Base of the objects created by :func:`over_buffer` and :func:`over_array`."""

    __slots__ = ("_array",)

    _array: Any

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._array)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled; pickle bytes(tensor) and its shape and datatype")


def over_buffer(cls: type[_E], shape: int | Sequence[int], dtype: Any, buffer: Any) -> _E:
    """Return an exporter of a contiguous buffer."""
    return over_array(cls, np.ndarray(shape, dtype, buffer))


def over_array(cls: type[_E], array: np.ndarray[Any, Any]) -> _E:
    """Return an exporter of an array's memory."""
    # Bypasses the subclass's ``__new__``.
    self = object.__new__(cls)
    view = array.view(np.ndarray)
    view.setflags(write=False)
    self._array = view
    return self
