"""Whether a value of protobuf's text format is one of a field's type."""

from __future__ import annotations

import re
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as Field

from ovmstrio.config.findings import did_you_mean
from ovmstrio.config.proto_text import ProtoScalar
from ovmstrio.config.value_rules import Unusable

__all__ = ["check_scalar"]

_INTEGER: Final = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19})")
_FLOAT: Final = re.compile(
    r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?|-?(?:inf|infinity|nan)", re.IGNORECASE
)
_BOOLEANS: Final = frozenset({"true", "True", "t", "false", "False", "f", "0", "1"})
_SIGNED_32: Final = frozenset({Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32})
_SIGNED_64: Final = frozenset({Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64})
_UNSIGNED_32: Final = frozenset({Field.TYPE_UINT32, Field.TYPE_FIXED32})
_FLOATS: Final = frozenset({Field.TYPE_FLOAT, Field.TYPE_DOUBLE})


def check_scalar(value: ProtoScalar, field: Any) -> None:
    """Check the value of a field that is no message.

    Raises:
        Unusable: it is none of the field's type.
    """
    if field.type in {Field.TYPE_STRING, Field.TYPE_BYTES}:
        if value.kind != "string":
            raise Unusable("text in quotes", f'write "{value.text}"')
    elif value.kind == "string":
        raise Unusable(_described(field), f"write {value.text[1:-1]} without quotes" if value.text[1:-1] else "")
    elif field.type == Field.TYPE_ENUM:
        _check_enum(value, field)
    elif field.type == Field.TYPE_BOOL or field.type in _FLOATS:
        is_right = value.text in _BOOLEANS if field.type == Field.TYPE_BOOL else _FLOAT.fullmatch(value.text)
        if not is_right:
            raise Unusable(_described(field))
    else:
        low, high = _limits(field)
        if not _INTEGER.fullmatch(value.text) or not low <= _integer(value.text) <= high:
            raise Unusable(f"a whole number from {low} to {high}")


def _check_enum(value: ProtoScalar, field: Any) -> None:
    names = [each.name for each in field.enum_type.values]
    if value.text not in names and (value.kind != "number" or value.text not in map(str, range(len(names)))):
        raise Unusable(", ".join(names), did_you_mean(value.text, names))


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
