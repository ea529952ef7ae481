"""Parameters of KServe messages, each a ``oneof`` of typed fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.request import ParameterValue

UNSIGNED_FROM: Final = 2**63
"""The lowest integer that exceeds ``int64_param``."""


def set_parameters(message: Any, parameters: Mapping[str, ParameterValue]) -> None:
    """Write parameters into a message's map, each into the field of its type."""
    for name, value in parameters.items():
        setattr(message.parameters[name], _field_of(value), value)


def _field_of(value: ParameterValue) -> str:
    match value:
        case bool():
            return "bool_param"
        case int():
            return "int64_param" if value < UNSIGNED_FROM else "uint64_param"
        case float():
            return "double_param"
        case str():
            return "string_param"
