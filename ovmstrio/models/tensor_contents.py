"""Conversion of listed values to arrays; values out of range are rejected, while OVMS truncates integers silently."""

from __future__ import annotations

import array as arrays
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer, Contents, InferInput
from ovmstrio.core.tensor import BY_NAME, BYTES, Array, Tensor, TensorSpec, to_bf16
from ovmstrio.models.request_errors import format_shape, input_mismatch, invalid_request
from ovmstrio.util.truncation import utf8

_PYTHON_TYPES: Final[dict[str, frozenset[type]]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
MAX_FILLED_BYTES: Final = 2**26
"""Largest array filled from fewer values, so that a small message cannot allocate a large array."""

_MAX_LISTED: Final = 1024
"""Up to this number of elements, ``array.array`` is faster than numpy."""
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
    """Return the number of values in the field of the element type; 0 if the values are in another field."""
    if contents is None or contents.field != spec.datatype.contents_field:
        return 0
    return len(contents.values)


def list_converter(spec: TensorSpec, shape: tuple[int, ...]) -> Callable[[Contents | None], Array | None]:
    """Return a fast converter from Python lists to arrays of one shape.

    The converter returns None for other or invalid values, which :func:`to_array` handles.
    """
    code, count = _CODES.get(spec.datatype.name), prod(shape)
    if code is None or not 0 < count <= _MAX_LISTED:
        return lambda _: None
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


def to_array(contents: Contents | None, shape: tuple[int, ...], count: int, spec: TensorSpec) -> Array:
    """Convert values to an array of ``shape`` with ``count`` elements.

    Raises:
        InvalidRequest: the number, type or range of the values is wrong.
    """
    actual = count_values(contents, spec)
    if actual != count and not _can_fill(contents, actual, count, spec):
        fixed = "Invalid number of values in tensor proto container"
        raise input_mismatch(fixed, f"{count} values", f"{actual} values", spec)
    try:
        if contents is None or not count:
            return np.empty(shape, spec.datatype.numpy)
        return _filled(_elements(contents.values, spec), count).reshape(shape)
    except InvalidRequest:
        raise
    except (OverflowError, ValueError) as error:
        raise _invalid_values(spec, str(error)) from None


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


def _can_fill(contents: Contents | None, actual: int, count: int, spec: TensorSpec) -> bool:
    if contents is None or not contents.repeat_last:
        return False
    return 0 < actual < count and count * spec.datatype.itemsize <= MAX_FILLED_BYTES


def _filled(array: Array, count: int) -> Array:
    if array.size == count:
        return array
    filled = np.full(count, array[-1])
    filled[: array.size] = array
    return filled


def _invalid_values(spec: TensorSpec, detail: str) -> Exception:
    return invalid_request("Invalid values in tensor proto container", f"{detail}; input name: {spec.name}")


def _check_kind(values: Sequence[Any] | Array, kind: str, spec: TensorSpec) -> None:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in _ARRAY_KINDS[kind] or values.ndim != 1:
            raise _invalid_values(spec, f"Expected: {spec.datatype.name}; Actual: {values.dtype}")
        return
    unexpected = set(map(type, values)) - _PYTHON_TYPES[kind]
    if unexpected:
        names = ", ".join(sorted(each.__name__ for each in unexpected))
        raise _invalid_values(spec, f"Expected: {spec.datatype.name}; Actual: {names}")


def _check_range(values: Sequence[Any] | Array, spec: TensorSpec) -> None:
    limits = np.iinfo(spec.datatype.numpy)
    if isinstance(values, np.ndarray):
        low, high = int(values.min()), int(values.max())
    else:
        low, high = min(values), max(values)
    if low < limits.min or high > limits.max:
        outside = low if low < limits.min else high
        raise _invalid_values(spec, f"{outside} is out of range of {spec.datatype.name} [{limits.min}, {limits.max}]")


# BYTES

MAX_ELEMENTS: Final = 2**25
"""Maximum number of strings in one tensor, as in OVMS."""

MAX_BYTES: Final = 2**30
"""Maximum size of the strings of one tensor, as rows of equal length."""

_LENGTH: Final = struct.Struct("<I")
_STRING_OUTPUT_SUFFIX: Final = "_string"
_MATRIX_RANK: Final = 2


def bytes_elements(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> list[bytes]:
    """Return the BYTES elements of a request.

    Raises:
        InvalidRequest: the framing of a raw buffer is invalid, or an element is not a string.
    """
    if raw is not None:
        return _split_elements(raw, spec)
    contents = given.contents
    if contents is None or contents.field != BYTES.contents_field:
        return []
    return [_to_bytes(value, contents, spec) for value in contents.values]


def _to_bytes(value: object, contents: Contents, spec: TensorSpec) -> bytes:
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    detail = f"Expected: BYTES; Actual: {type(value).__name__} in {contents.field}; input name: {spec.name}"
    raise invalid_request("Invalid values in tensor proto container", detail)


def _split_elements(raw: Buffer, spec: TensorSpec) -> list[bytes]:
    # Slices of bytes take half the time of those of a memoryview, which must be copied.
    data = bytes(raw)
    end, position, unpack, prefix = len(data), 0, _LENGTH.unpack_from, _LENGTH.size
    elements: list[bytes] = []
    while position < end:
        start = position + prefix
        if start > end:
            raise _bad_framing(spec, f"{end - position} bytes left, expected a 4-byte length")
        (length,) = unpack(data, position)
        position = start + length
        if position > end:
            raise _bad_framing(spec, f"an element has {length} bytes, {end - start} bytes left")
        elements.append(data[start:position])
    return elements


def _bad_framing(spec: TensorSpec, detail: str) -> Exception:
    fixed = "Inputs inside buffer do not match the expected format"
    return invalid_request(
        fixed, f"each BYTES element follows a little-endian uint32 length; {detail}; input name: {spec.name}"
    )


def _check_size(elements: Sequence[bytes], width: int, spec: TensorSpec) -> None:
    if len(elements) * width > MAX_BYTES:
        fixed = "String max size exceeded"
        detail = f"{len(elements)} strings of up to {width} bytes"
        raise input_mismatch(fixed, f"at most {MAX_BYTES} bytes", detail, spec)


def native_strings(given: InferInput, raw: Buffer | None, count: int, spec: TensorSpec) -> Array:
    """Convert BYTES elements to an object array of the request's validated shape with ``count`` elements.

    Raises:
        InvalidRequest: the strings are too many or too large, their framing is invalid, or their number is wrong.
    """
    if count > MAX_ELEMENTS:
        raise input_mismatch("String max size exceeded", f"at most {MAX_ELEMENTS} strings", count, spec)
    elements = bytes_elements(given, raw, spec)
    if len(elements) != count:
        raise input_mismatch("Invalid string input", f"{count} strings", f"{len(elements)} strings", spec)
    _check_size(elements, max(map(len, elements), default=0), spec)
    array = np.empty(count, dtype=object)
    array[:] = elements
    return array.reshape(given.shape)


def is_string_matrix(spec: TensorSpec) -> bool:
    """Return whether an input can take strings as rows of bytes."""
    return spec.datatype.name == "UINT8" and len(spec.shape) == _MATRIX_RANK


def string_matrix(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> Array:
    """Convert strings to a ``UINT8`` matrix, padded with zeros to one more than the longest.

    Raises:
        InvalidRequest: the shape, number or lengths of the strings do not match the input.
    """
    if len(given.shape) != 1:
        raise input_mismatch("Invalid number of shape dimensions", "(-1)", format_shape(given.shape), spec)
    elements = bytes_elements(given, raw, spec)
    fixed = "Invalid input batch size"
    if given.shape[0] != len(elements):
        raise input_mismatch(fixed, given.shape[0], f"{len(elements)} strings", spec)
    if not elements:
        raise input_mismatch(fixed, "at least 1", "no strings", spec)
    if not spec.shape[0].accepts(len(elements)):
        raise input_mismatch(fixed, spec.shape[0], len(elements), spec)
    width = max(map(len, elements)) + 1
    if not spec.shape[1].accepts(width):
        raise input_mismatch(
            "Invalid input shape", format_shape(spec.shape), format_shape((len(elements), width)), spec
        )
    _check_size(elements, width, spec)
    padded = b"".join(element.ljust(width, b"\0") for element in elements)
    return np.frombuffer(padded, np.uint8).reshape(len(elements), width)


def rows_to_strings(output: Tensor) -> Tensor:
    """Convert a byte matrix named ``..._string`` to strings, cut at the first NUL."""
    array = output.array
    if output.datatype is not BY_NAME["UINT8"] or array.ndim != _MATRIX_RANK:
        return output
    if not output.name.endswith(_STRING_OUTPUT_SUFFIX):
        return output
    rows = np.empty(array.shape[0], dtype=object)
    rows[:] = [row.tobytes().partition(b"\0")[0] for row in array]
    return Tensor(output.name, BYTES, rows)
