"""Elements of JSON as the contents of an input of a known datatype.

JSON says only "number", so the datatype is that of the model's input.  As in OVMS a fraction for an integer input loses
what stands behind the point; what the datatype cannot hold at all is refused.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.api.kserve.rest.infer_request import TOO_DEEP
from ovmstrio.core.datatypes import BY_NAME, BYTES, to_bf16
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents

if TYPE_CHECKING:
    from ovmstrio.core.datatypes import Datatype

__all__ = ["Nested", "Unreadable", "guess_datatype", "is_binary", "read_elements", "unnest"]

MAX_RANK: Final = 98
"""Lists that may lie in each other; the document and its object of inputs are the other two of a hundred levels."""


@dataclass(frozen=True, slots=True)
class Nested:
    """The elements of a value in their order, the Python types that they have, and the shape that the lists gave."""

    shape: tuple[int, ...]
    elements: list[Any]
    kinds: set[type]


def unnest(value: Any) -> Nested | None:
    """Take a value apart; one that is no list has no dimensions.

    None where lists of one level differ in length, or have elements beside them.

    Raises:
        InvalidRequest: the lists lie too deep in each other.
    """
    shape: list[int] = []
    level = [value]
    while list in (kinds := set(map(type, level))):
        sizes = set(map(len, level)) if len(kinds) == 1 else set()
        if len(sizes) != 1:
            return None
        shape.append(sizes.pop())
        if len(shape) > MAX_RANK:
            raise InvalidRequest(f"{TOO_DEEP} - at most {MAX_RANK} lists of a tensor may lie in each other")
        level = list(chain.from_iterable(level))
    return Nested(tuple(shape), level, kinds)


_NUMBERS: Final = frozenset({int, float})
_TEXTS: Final = frozenset({str, dict})
_TAKES_TEXT: Final = frozenset({"BYTES", "UINT8"})
_NAMES: Final = {bool: "boolean", dict: "object", float: "number", int: "number", str: "text", type(None): "null"}


class Unreadable(ValueError):
    """The elements are not those of the datatype; the text says why."""


def is_binary(value: Any) -> bool:
    """Tell whether a value is ``{"b64": text}``, which stands for one element of bytes."""
    return type(value) is dict and len(value) == 1 and type(value.get("b64")) is str


def guess_datatype(nested: Nested) -> Datatype:
    """Choose the datatype of an input that the model does not have; the model will refuse it."""
    if nested.kinds <= {int}:
        return BY_NAME["INT32"]
    if nested.kinds <= {bool}:
        return BY_NAME["BOOL"]
    return BYTES if nested.kinds <= _TEXTS else BY_NAME["FP32"]


def read_elements(nested: Nested, datatype: Datatype) -> tuple[Datatype, Contents]:
    """Make the contents of an input: of its own datatype, or of BYTES where texts or encoded bytes were sent.

    Raises:
        Unreadable: the elements are of another kind, or of several kinds, or no value of the datatype.
    """
    kinds = nested.kinds
    if not kinds:
        return datatype, Contents(datatype.contents_field, [])
    if kinds <= _TEXTS:
        return BYTES, Contents(BYTES.contents_field, _texts(nested, datatype))
    if kinds <= _NUMBERS and datatype is not BYTES and datatype.name != "BOOL":
        return datatype, Contents(datatype.contents_field, _numbers(nested, datatype))
    if kinds == {bool} and datatype.name == "BOOL":
        return datatype, Contents(datatype.contents_field, nested.elements)
    found = ", ".join(sorted({_NAMES[kind] for kind in kinds}))
    raise Unreadable(f"expected elements of {datatype.name}, got {found}")


def _texts(nested: Nested, datatype: Datatype) -> list[bytes]:
    if str in nested.kinds and datatype.name not in _TAKES_TEXT:
        raise Unreadable(f'expected elements of {datatype.name} or {{"b64": ...}}, got text')
    return [_bytes(element) for element in nested.elements]


def _bytes(element: str | dict[str, Any]) -> bytes:
    if isinstance(element, str):
        return element.encode("utf-8", "surrogatepass")
    if not is_binary(element):
        raise Unreadable('an object among the elements is not {"b64": text}')
    try:
        return binascii.a2b_base64(element["b64"].encode(), strict_mode=True)
    except ValueError as error:
        raise Unreadable(f"b64 cannot be decoded: {error}") from None


def _numbers(nested: Nested, datatype: Datatype) -> Any:
    if datatype.name == "BF16":
        return to_bf16(_floats(nested, np.dtype(np.float32)))
    if datatype.numpy.kind == "f":
        return _floats(nested, datatype.numpy)
    if nested.kinds == {int}:
        return nested.elements
    try:
        return list(map(int, nested.elements))
    except (OverflowError, ValueError) as error:
        raise Unreadable(f"{datatype.name} has no such value: {error}") from None


def _floats(nested: Nested, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        try:
            return np.array(nested.elements, dtype)
        except OverflowError as error:
            raise Unreadable(str(error)) from None
