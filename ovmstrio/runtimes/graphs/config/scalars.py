"""Whether a value is one of a field's type."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FieldDescriptor as Field

from ovmstrio.config.findings import did_you_mean
from ovmstrio.runtimes.graphs.config.syntax import Scalar

__all__ = ["Wrong", "check_scalar"]

_INTEGER: Final = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19})")
_FLOAT: Final = re.compile(
    r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?|-?(?:inf|infinity|nan)", re.IGNORECASE
)
_BOOLEANS: Final = frozenset({"true", "True", "t", "false", "False", "f", "0", "1"})
_SIGNED_32: Final = frozenset({Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32})
_SIGNED_64: Final = frozenset({Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64})
_UNSIGNED_32: Final = frozenset({Field.TYPE_UINT32, Field.TYPE_FIXED32})
_FLOATS: Final = frozenset({Field.TYPE_FLOAT, Field.TYPE_DOUBLE})


class Wrong(NamedTuple):
    """What a value should have been."""

    expected: str
    fix: str = ""


def check_scalar(value: Scalar, field: Any) -> Wrong | None:
    """Tell what is wrong with the value of a field that is no message."""
    if field.type in {Field.TYPE_STRING, Field.TYPE_BYTES}:
        return None if value.kind == "string" else Wrong("text in quotes", f'write "{value.text}"')
    if value.kind == "string":
        return Wrong(_described(field), f"write {value.text[1:-1]} without quotes" if value.text[1:-1] else "")
    if field.type == Field.TYPE_BOOL:
        return None if value.text in _BOOLEANS else Wrong(_described(field))
    if field.type == Field.TYPE_ENUM:
        return _check_enum(value, field)
    if field.type in _FLOATS:
        return None if _FLOAT.fullmatch(value.text) else Wrong(_described(field))
    low, high = _limits(field)
    if not _INTEGER.fullmatch(value.text) or not low <= _integer(value.text) <= high:
        return Wrong(f"a whole number from {low} to {high}")
    return None


def _check_enum(value: Scalar, field: Any) -> Wrong | None:
    names = [each.name for each in field.enum_type.values]
    if value.text in names or (value.kind == "number" and value.text in map(str, range(len(names)))):
        return None
    return Wrong(", ".join(names), did_you_mean(value.text, names))


def _described(field: Any) -> str:
    if field.type == Field.TYPE_BOOL:
        return "true or false"
    if field.type == Field.TYPE_ENUM:
        return ", ".join(each.name for each in field.enum_type.values)
    return "a number"


def _integer(text: str) -> int:
    digits = text.lstrip("-")
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    number = int(digits, base)
    return -number if text.startswith("-") else number


def _limits(field: Any) -> tuple[int, int]:
    if field.type in _SIGNED_32:
        return -(2**31), 2**31 - 1
    if field.type in _SIGNED_64:
        return -(2**63), 2**63 - 1
    return 0, 2**32 - 1 if field.type in _UNSIGNED_32 else 2**64 - 1
