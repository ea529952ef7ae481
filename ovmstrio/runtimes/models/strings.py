"""BYTES elements: their framing in raw buffers, and the two ways in which models take and give strings.

A model has strings either natively or as a matrix of ``UINT8``, a row a string, padded with zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.request import Buffer, Contents, InferInput
from ovmstrio.core.tensor import Array, Tensor, TensorSpec
from ovmstrio.core.texts import utf8
from ovmstrio.runtimes.models.rejections import mismatch, refused, show_shape

__all__ = ["elements_of", "is_string_matrix", "native_strings", "string_matrix", "strings_of_rows"]

MAX_ELEMENTS: Final = 2**25
"""The most strings in one tensor; 33.5 million, as in OVMS."""

MAX_BYTES: Final = 2**30
"""The most bytes that the strings of one tensor may take as rows of the longest one's length."""

_LENGTH: Final = struct.Struct("<I")
_STRING_OUTPUT_SUFFIX: Final = "_string"
_MATRIX_RANK: Final = 2


def elements_of(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> list[bytes]:
    """Take the elements out of wherever the request has them.

    Raises:
        InvalidRequest: the framing of a raw buffer is broken, or an element is no string.
    """
    if raw is not None:
        return _unframe(raw, spec)
    contents = given.contents
    if contents is None or contents.field != BYTES.contents_field:
        return []
    return [_encoded(value, contents, spec) for value in contents.values]


def _encoded(value: object, contents: Contents, spec: TensorSpec) -> bytes:
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    detail = f"Expected: BYTES; Actual: {type(value).__name__} in {contents.field}; input name: {spec.name}"
    raise refused("Invalid values in tensor proto container", detail)


def _unframe(raw: Buffer, spec: TensorSpec) -> list[bytes]:
    view = memoryview(raw)
    end, position = view.nbytes, 0
    elements: list[bytes] = []
    while position < end:
        start = position + _LENGTH.size
        if start > end:
            raise _bad_framing(spec, f"{end - position} bytes are left where a length of 4 bytes must stand")
        (length,) = _LENGTH.unpack_from(view, position)
        position = start + length
        if position > end:
            raise _bad_framing(spec, f"an element of {length} bytes is announced and {end - start} are left")
        elements.append(bytes(view[start:position]))
    return elements


def _bad_framing(spec: TensorSpec, detail: str) -> Exception:
    fixed = "Inputs inside buffer do not match the expected format"
    return refused(
        fixed, f"BYTES elements are each behind a little-endian uint32 length; {detail}; input name: {spec.name}"
    )


def _check_size(elements: Sequence[bytes], width: int, spec: TensorSpec) -> None:
    if len(elements) * width > MAX_BYTES:
        fixed = "String max size exceeded"
        detail = f"{len(elements)} strings, of which the longest has {width} bytes"
        raise mismatch(fixed, f"at most {MAX_BYTES} bytes", detail, spec)


def native_strings(given: InferInput, raw: Buffer | None, count: int, spec: TensorSpec) -> Array:
    """Make an object array of the request's shape, which has been checked and has ``count`` elements.

    Raises:
        InvalidRequest: too many or too large strings, broken framing, or another number of them than the shape has.
    """
    if count > MAX_ELEMENTS:
        raise mismatch("String max size exceeded", f"at most {MAX_ELEMENTS} strings", count, spec)
    elements = elements_of(given, raw, spec)
    if len(elements) != count:
        raise mismatch("Invalid string input", f"{count} strings", f"{len(elements)} strings", spec)
    _check_size(elements, max(map(len, elements), default=0), spec)
    array = np.empty(count, dtype=object)
    array[:] = elements
    return array.reshape(given.shape)


def is_string_matrix(spec: TensorSpec) -> bool:
    """Tell whether an endpoint can take strings as rows of bytes."""
    return spec.datatype.name == "UINT8" and len(spec.shape) == _MATRIX_RANK


def string_matrix(given: InferInput, raw: Buffer | None, spec: TensorSpec) -> Array:
    """Make a ``UINT8`` matrix of the strings, each padded with zeros to one more than the longest.

    Raises:
        InvalidRequest: the shape, the number or the lengths of the strings do not fit the input.
    """
    if len(given.shape) != 1:
        raise mismatch("Invalid number of shape dimensions", "(-1)", show_shape(given.shape), spec)
    elements = elements_of(given, raw, spec)
    fixed = "Invalid input batch size"
    if given.shape[0] != len(elements):
        raise mismatch(fixed, given.shape[0], f"{len(elements)} strings", spec)
    if not elements:
        raise mismatch(fixed, "at least 1", "no strings", spec)
    if not spec.shape[0].accepts(len(elements)):
        raise mismatch(fixed, spec.shape[0], len(elements), spec)
    width = max(map(len, elements)) + 1
    if not spec.shape[1].accepts(width):
        raise mismatch("Invalid input shape", show_shape(spec.shape), show_shape((len(elements), width)), spec)
    _check_size(elements, width, spec)
    padded = b"".join(element.ljust(width, b"\0") for element in elements)
    return np.frombuffer(padded, np.uint8).reshape(len(elements), width)


def strings_of_rows(output: Tensor) -> Tensor:
    """Give an output called ``..._string`` that is a matrix of bytes as strings, each cut at its first NUL."""
    array = output.array
    if output.datatype is not BY_NAME["UINT8"] or array.ndim != _MATRIX_RANK:
        return output
    if not output.name.endswith(_STRING_OUTPUT_SUFFIX):
        return output
    rows = np.empty(array.shape[0], dtype=object)
    rows[:] = [row.tobytes().partition(b"\0")[0] for row in array]
    return Tensor(output.name, BYTES, rows)
