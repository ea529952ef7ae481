"""How one value of ``config.yml`` is read: its type and its bounds, or what was expected instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from ovmstrio.config.findings import did_you_mean

__all__ = ["Unusable", "Value", "choice", "flag", "level", "number", "text", "texts", "whole"]

Value = Callable[[Any], Any]
"""Takes what the file has, lists and mappings without places; gives what the settings have, or raises Unusable."""

_LEVELS: Final = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
}


class Unusable(ValueError):
    """The value is none of those that the key can have."""

    def __init__(self, expected: str, suggestion: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.suggestion = suggestion


def whole(lowest: int | None = None, highest: int | None = None, *also: int) -> Value:
    """Take a whole number within bounds, or one of ``also``."""
    bounds = "" if lowest is None else f" of {lowest} or more" if highest is None else f" of {lowest} to {highest}"
    expected = " or ".join([f"a whole number{bounds}", *map(str, also)])

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            quoted = isinstance(value, str) and value.strip().lstrip("-").isdigit()
            raise Unusable(expected, "remove the quotes" if quoted else "")
        inside = (lowest is None or value >= lowest) and (highest is None or value <= highest)
        if not inside and value not in also:
            raise Unusable(expected)
        return value

    return read


def number(above: float) -> Value:
    """Take a number above a bound."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise Unusable(f"a number above {above:g}")
        return float(value)

    return read


def flag(value: Any) -> bool:
    """Take a truth value."""
    if not isinstance(value, bool):
        raise Unusable("true or false", "remove the quotes" if str(value).lower() in {"true", "false"} else "")
    return value


def text(value: Any) -> str:
    """Take a text."""
    if not isinstance(value, str):
        is_scalar = isinstance(value, int | float)
        raise Unusable("a text", f'put it in quotes: "{value}"' if is_scalar else "")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Take a list of texts."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Unusable("a list of texts", f'write a list: ["{value}"]' if isinstance(value, str) else "")
    return tuple(value)


def choice(words: Sequence[str]) -> Value:
    """Take one of several words."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            hint = did_you_mean(value, words) if isinstance(value, str) else ""
            raise Unusable(" or ".join(words), hint)
        return value

    return read


def level(value: Any) -> int:
    """Take the name of a log level in any case."""
    found = _LEVELS.get(value.upper()) if isinstance(value, str) else None
    if found is None:
        raise Unusable(" or ".join(_LEVELS), did_you_mean(str(value).upper(), _LEVELS))
    return found
