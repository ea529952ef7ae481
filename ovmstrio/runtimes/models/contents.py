"""Turn values that came one by one into an array, refusing what the element type cannot hold.

OVMS narrows integers silently; here a value out of range is refused, because the model would see another number.
"""

from __future__ import annotations

import array as arrays
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from ovmstrio.core.datatypes import BY_NAME, to_bf16
from ovmstrio.core.request import Contents
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.runtimes.models.rejections import mismatch, refused

__all__ = ["count_values", "listed_numbers", "to_array"]

_PYTHON_TYPES: Final[dict[str, frozenset[type]]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
MAX_FILLED_BYTES: Final = 2**26
"""The largest array that fewer values than elements may stand for: a small message must not ask for a large one."""

_MOST_LISTED: Final = 1024
"""Elements up to which the standard library's arrays take less time than numpy's, which have more to look at first."""
_CODES: Final = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
_BF16: Final = BY_NAME["BF16"]
_ARRAY_KINDS: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def count_values(contents: Contents | None, spec: TensorSpec) -> int:
    """Count the values in the one field that may carry this element type; values elsewhere count as none."""
    if contents is None or contents.field != spec.datatype.contents_field:
        return 0
    return len(contents.values)


def listed_numbers(spec: TensorSpec, shape: tuple[int, ...]) -> Callable[[Contents | None], Array | None]:
    """Make what gives the numbers of an input of one shape that come as a list of Python's, as an array.

    It gives None where they are no such list, too many, or not right, for :func:`to_array` to judge.
    """
    code, count = _CODES.get(spec.datatype.name), prod(shape)
    if code is None or not 0 < count <= _MOST_LISTED:
        return _no_numbers
    dtype, field = spec.datatype.numpy, spec.datatype.contents_field
    allowed = _PYTHON_TYPES[dtype.kind]

    def numbers(contents: Contents | None) -> Array | None:
        if contents is None or contents.field != field:
            return None
        values = contents.values
        if type(values) is not list or len(values) != count:
            return None
        if not contents.is_checked and not allowed.issuperset(map(type, values)):
            return None
        try:
            return np.ndarray(shape, dtype, arrays.array(code, values))
        except OverflowError:
            return None

    return numbers


def _no_numbers(_: Contents | None) -> None:
    return None


def to_array(contents: Contents | None, shape: tuple[int, ...], count: int, spec: TensorSpec) -> Array:
    """Make an array of ``shape``, which has ``count`` elements.

    Raises:
        InvalidRequest: there are more or fewer values, values of another kind, or values out of range.
    """
    actual = count_values(contents, spec)
    if actual != count and not _may_fill(contents, actual, count, spec):
        fixed = "Invalid number of values in tensor proto container"
        raise mismatch(fixed, f"{count} values", f"{actual} values", spec)
    if contents is None or not count:
        return np.empty(shape, spec.datatype.numpy)
    values = contents.values
    try:
        return _filled(_elements(values, spec), count).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise _wrong_values(spec, str(error)) from None


def _elements(values: Sequence[Any] | Array, spec: TensorSpec) -> Array:
    dtype = spec.datatype.numpy
    is_bits = isinstance(values, np.ndarray) and values.dtype == dtype
    if spec.datatype is _BF16 and not is_bits:
        _check_kind(values, "f", spec)
        with np.errstate(over="ignore"):
            return to_bf16(np.asarray(values, np.float32))
    _check_kind(values, dtype.kind, spec)
    if dtype.kind in "iu":
        _check_range(values, spec)
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype)


def _may_fill(contents: Contents | None, actual: int, count: int, spec: TensorSpec) -> bool:
    if contents is None or not contents.repeat_last:
        return False
    return 0 < actual < count and count * spec.datatype.itemsize <= MAX_FILLED_BYTES


def _filled(array: Array, count: int) -> Array:
    """Repeat the last element until there are ``count``."""
    if array.size == count:
        return array
    filled = np.full(count, array[-1])
    filled[: array.size] = array
    return filled


def _wrong_values(spec: TensorSpec, detail: str) -> Exception:
    return refused("Invalid values in tensor proto container", f"{detail}; input name: {spec.name}")


def _check_kind(values: Sequence[Any] | Array, kind: str, spec: TensorSpec) -> None:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in _ARRAY_KINDS[kind] or values.ndim != 1:
            raise _wrong_values(spec, f"Expected: {spec.datatype.name}; Actual: {values.dtype}")
        return
    strangers = set(map(type, values)) - _PYTHON_TYPES[kind]
    if strangers:
        names = ", ".join(sorted(stranger.__name__ for stranger in strangers))
        raise _wrong_values(spec, f"Expected: {spec.datatype.name}; Actual: {names}")


def _check_range(values: Sequence[Any] | Array, spec: TensorSpec) -> None:
    limits = np.iinfo(spec.datatype.numpy)
    if isinstance(values, np.ndarray):
        low, high = int(values.min()), int(values.max())
    else:
        low, high = min(values), max(values)
    if low < limits.min or high > limits.max:
        outside = low if low < limits.min else high
        raise _wrong_values(spec, f"{outside} is out of range of {spec.datatype.name} [{limits.min}, {limits.max}]")
