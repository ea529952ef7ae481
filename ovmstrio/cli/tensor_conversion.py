"""Lossless conversion of JSON and NumPy values to the datatype of an input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.raw_contents import bytes_array, from_raw, to_raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

_ROUNDING: Final = {"BF16": 2**-8}
_USUAL_ROUNDING: Final = 1e-3
"""Maximum relative error of conversion to a narrower floating-point type."""
_NOT_NUMBERS: Final = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
"""Texts that the server writes for values that JSON numbers cannot express."""
_LARGEST_SIGNED: Final = 2**63
_MOST_DIMENSIONS: Final = 32
"""Maximum rank of arrays that numpy can iterate over."""


def to_type(value: Any, tensor: TensorInfo, report: Callable[[str], None]) -> Array:
    """Convert an array, or nested lists from JSON; ``BF16`` becomes ``float32``.

    Raises:
        InvalidRequest: values would change, or have an incompatible type.
    """
    of_file = isinstance(value, np.ndarray) and not value.dtype.hasobject
    if tensor.datatype == BYTES.name:
        return _texts(value, tensor)
    array = value if of_file else _numbers(_elements(value), tensor)
    wanted = np.dtype(np.float32) if tensor.datatype == "BF16" else BY_NAME[tensor.datatype].numpy
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "buif":
        raise _refused(tensor, f"got {array.dtype}")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
        survived = _survived(array, _as_sent(converted, tensor.datatype), tensor.datatype)
    if not survived:
        raise _refused(tensor, f"got {array.dtype}, whose values would change")
    if of_file:
        report(f"input {tensor.name}: converted {array.dtype} to {tensor.datatype}")
    return converted


def to_own_type(value: Any, tensor: TensorInfo) -> bytes | Array:
    """Return an array unchanged, a text as bytes, and other JSON as an array of the type of its values.

    As in ``/generate``, integers are ``INT64``, other numbers ``FP64``; a single number becomes a list.

    Raises:
        InvalidRequest: the values have no common type.
    """
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, str):
        return value.encode()
    elements = _elements(value)
    kinds = {type(each) for each in elements.flat}
    if kinds and kinds <= {str, bytes}:
        return _texts(value, tensor)
    return np.atleast_1d(_numbers(elements, tensor))


def _refused(tensor: TensorInfo, found: str) -> InvalidRequest:
    wanted = tensor.datatype if tensor.datatype in BY_NAME else "numbers, truth values or texts"
    return InvalidRequest(f'input "{tensor.name}": expected {wanted}, {found}')


def _as_sent(converted: Array, datatype: str) -> Array:
    """Return the values that the server receives: encoding rounds ``BF16``."""
    return from_raw(to_raw(converted, datatype), datatype, converted.shape) if datatype == "BF16" else converted


def _survived(array: Array, converted: Array, datatype: str) -> bool:
    """Return whether values are equal, or equal within rounding between floating-point types."""
    if array.dtype.kind == converted.dtype.kind == "f":
        exact, near = array.astype(np.float64), converted.astype(np.float64)
        return bool(np.allclose(near, exact, rtol=_ROUNDING.get(datatype, _USUAL_ROUNDING), equal_nan=True))
    # A value that wraps around between signed and unsigned wraps back, so only its sign shows the difference.
    same_sign = np.array_equal(converted < 0, array < 0)
    # The conversion of infinity to integers depends on the CPU.
    is_finite = converted.dtype.kind != "f" or bool(np.isfinite(converted).all())
    return same_sign and is_finite and bool(np.array_equal(converted.astype(array.dtype), array))


def _elements(value: Any) -> Array:
    """Convert nested lists to an array of objects; ragged lists stay lists inside the array."""
    try:
        elements: Array = np.array(value, object)
        if elements.ndim <= _MOST_DIMENSIONS:
            return elements
    except ValueError:
        pass
    ragged = np.empty(1, object)
    ragged[0] = value
    return ragged


def _numbers(elements: Array, tensor: TensorInfo) -> Array:
    """Convert JSON values to the narrowest of BOOL, integers and FP64 that holds all of them."""
    kinds = {type(each) for each in elements.flat}
    if kinds == {bool}:
        return elements.astype(bool)
    if kinds and kinds <= {bool, int}:
        low, high = min(elements.flat), max(elements.flat)
        if not (low >= -_LARGEST_SIGNED and high < (2 * _LARGEST_SIGNED if low >= 0 else _LARGEST_SIGNED)):
            raise _refused(tensor, f"got {low if low < 0 else high}, which fits no integer type")
        return elements.astype(np.int64 if high < _LARGEST_SIGNED else np.uint64)
    plain = [_NOT_NUMBERS.get(each, each) if isinstance(each, str) else each for each in elements.flat]
    strangers = sorted({type(each).__name__ for each in plain} - {"bool", "int", "float"})
    if "list" in strangers:
        raise _refused(tensor, "got lists of differing lengths or depths")
    if strangers == ["str"] and len(plain) > sum(isinstance(each, str) for each in plain):
        raise _refused(tensor, "got texts and numbers together")
    if strangers:
        raise _refused(tensor, f"got JSON with values of type {', '.join(strangers)}")
    try:
        return np.array(plain, np.float64).reshape(elements.shape)
    except OverflowError:
        raise _refused(tensor, "got a number that is too large") from None


def _texts(value: Any, tensor: TensorInfo) -> Array:
    elements = value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind in "SU" else _elements(value)
    strangers = sorted({type(each).__name__ for each in elements.flat if not isinstance(each, str | bytes)})
    if strangers:
        raise _refused(tensor, f"got values of type {', '.join(strangers)}")
    try:
        encoded = [each.encode() if isinstance(each, str) else bytes(each) for each in elements.flat]
    except UnicodeEncodeError as error:
        raise _refused(tensor, f"got text that has no UTF-8 form: {error.reason}") from None
    return bytes_array(encoded, elements.shape)
