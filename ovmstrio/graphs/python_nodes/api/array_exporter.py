"""Read-only buffer exporter over an array, for Pythons without ``__buffer__``.

There, only subclasses of C classes can export a buffer, so this class subclasses ndarray and hides its methods,
operators and items.  Numpy functions accept it as any other buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Exporter", "over_array", "over_buffer"]

_E = TypeVar("_E", bound="Exporter")

_new: Final[Any] = np.ndarray.__new__
_view: Final[Any] = np.ndarray.view
_setflags: Final[Any] = np.ndarray.setflags


class _Hidden:
    """Descriptor that hides an attribute of arrays."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}; use np.asarray(tensor)")

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self._name!r}")


def _no_operator(_self: Any, *_others: Any) -> Any:
    return NotImplemented


def _no_items(self: Any, *_where: Any) -> NoReturn:
    raise TypeError(f"{type(self).__name__!r} object has no items; use np.asarray(tensor)")


def _no_number(self: Any, *_more: Any) -> NoReturn:
    raise TypeError(f"{type(self).__name__!r} object is not a number; use np.asarray(tensor)")


def _as_arrays(value: Any) -> Any:
    """Replace exporters by arrays, also in lists, tuples and dictionaries."""
    match value:
        case Exporter():
            return np.asarray(value)
        case list() | tuple():
            return type(value)(map(_as_arrays, value))
        case dict():
            return {key: _as_arrays(each) for key, each in value.items()}
        case _:
            return value


def _names(*stems: str) -> tuple[str, ...]:
    return tuple(f"__{stem}__" for stem in stems)


_BINARY: Final = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift")
_BITS: Final = ("and", "xor", "or")
_OPERATORS: Final = _names(
    *(prefix + stem for stem in _BINARY + _BITS for prefix in ("", "r", "i") if prefix + stem != "idivmod"),
    *("lt", "le", "gt", "ge"),
)
_ITEMS: Final = _names("len", "getitem", "setitem", "delitem", "contains", "iter")
_NUMBERS: Final = _names("abs", "neg", "pos", "invert", "int", "float", "complex", "index")


def _hidden_namespace() -> dict[str, Any]:
    public = (name for name in dir(np.ndarray) if not name.startswith("_"))
    hidden: dict[str, Any] = {name: _Hidden() for name in public}
    for names, stand_in in ((_OPERATORS, _no_operator), (_ITEMS, _no_items), (_NUMBERS, _no_number)):
        hidden.update(dict.fromkeys(names, stand_in))
    return hidden


class Exporter(np.ndarray[Any, Any]):
    """Base of the objects created by :func:`over_buffer` and :func:`over_array`."""

    __slots__ = ()

    vars().update(_hidden_namespace())

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]
    __repr__ = object.__repr__
    __str__ = object.__str__
    __format__ = object.__format__

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted(name for cls in type(self).__mro__[:-3] for name in vars(cls))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled; pickle bytes(tensor) and its shape and datatype")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*_as_arrays(inputs), **_as_arrays(kwargs))

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return func(*_as_arrays(tuple(args)), **_as_arrays(dict(kwargs)))


def over_buffer(cls: type[_E], shape: int | Sequence[int], dtype: Any, buffer: Any) -> _E:
    """Return an exporter of a contiguous buffer."""
    self: _E = _new(cls, shape, dtype, buffer)
    _setflags(self, False)
    return self


def over_array(cls: type[_E], array: np.ndarray[Any, Any]) -> _E:
    """Return an exporter of an array's memory."""
    self: _E = _view(array, cls)
    _setflags(self, False)
    return self
