"""How one value of a file is read: its type and its bounds, or what was expected instead.

A class of settings declares its keys by annotating its fields with rules: ``retry: Annotated[int, whole(1)] = 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, get_type_hints

from ovmstrio.config.findings import did_you_mean
from ovmstrio.config.located import Located

__all__ = [
    "Rule",
    "Rules",
    "Unusable",
    "any_flag",
    "any_number",
    "any_whole",
    "any_word",
    "choice",
    "flag",
    "number",
    "rules_of",
    "text",
    "texts",
    "whole",
    "written",
]

Rule = Callable[[Located], Any]
"""Takes a member of a file, gives what the settings have, or raises Unusable."""

Rules = Mapping[str, Rule | None]
"""The keys that a mapping can have; those that hold mappings and lists of their own are there without a rule."""

_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Unusable(ValueError):
    """The value is none of those that the key can have; ``message`` says so."""

    def __init__(self, expected: str, suggestion: str = "", *, message: str = "the value cannot be used") -> None:
        super().__init__(expected)
        self.message = message
        self.expected = expected
        self.suggestion = suggestion


@cache
def rules_of(settings: type) -> Mapping[str, Rule]:
    """Give the keys that a class of settings declares, with their rules; fields without a rule are no keys."""
    hints = get_type_hints(settings, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: rules[0] for name, rules in metadata.items() if rules}


def whole(lowest: int | None = None, highest: int | None = None, *also: int) -> Rule:
    """Take a whole number within bounds, or one of ``also``."""
    expected = " or ".join([_bounded(lowest, highest), *map(str, also)])

    def read(node: Located) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int):
            quoted = isinstance(value, str) and value.strip().lstrip("-").isdigit()
            raise Unusable(expected, "remove the quotes" if quoted else "")
        inside = (lowest is None or value >= lowest) and (highest is None or value <= highest)
        if not inside and value not in also:
            raise Unusable(expected)
        return value

    return read


def any_whole(lowest: int, highest: int | None = None) -> Rule:
    """Take a whole number within bounds in any spelling, such as ``"8080"``."""

    def read(node: Located) -> int:
        value = _number(node.value)
        if value is None or not value.is_integer() or not lowest <= value <= (highest or math.inf):
            raise Unusable(_bounded(lowest, highest))
        return int(value)

    return read


def number(above: float) -> Rule:
    """Take a number above a bound."""

    def read(node: Located) -> float:
        value = None if isinstance(node.value, str) else _number(node.value)
        if value is None or not above < value < math.inf:
            raise Unusable(f"a number above {above:g}")
        return value

    return read


def any_number(what: str) -> Rule:
    """Take a number above 0 in any spelling; ``what`` is what it counts."""

    def read(node: Located) -> float:
        value = _number(node.value)
        if value is None or not 0 < value < math.inf:
            raise Unusable(f"a number of {what} above 0")
        return value

    return read


def flag(node: Located) -> bool:
    """Take a truth value."""
    if not isinstance(node.value, bool):
        quoted = str(node.value).lower() in {"true", "false"}
        raise Unusable("true or false", "remove the quotes" if quoted else "")
    return node.value


def any_flag(node: Located) -> bool:
    """Take a truth value in any spelling."""
    value = node.value
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    if not isinstance(value, bool):
        raise Unusable("true or false")
    return value


def text(node: Located) -> str:
    """Take a text."""
    if not isinstance(node.value, str):
        is_scalar = isinstance(node.value, int | float)
        raise Unusable("a text", f'put it in quotes: "{node.value}"' if is_scalar else "")
    return node.value


def written(node: Located) -> str:
    """Take a scalar of YAML as it is written, which is not empty."""
    given = node.text.strip()
    if isinstance(node.value, dict | list) or not given or "\0" in given:
        raise Unusable("a text that is not empty")
    return given


def texts(node: Located) -> tuple[str, ...]:
    """Take a list of texts."""
    value = node.plain()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Unusable("a list of texts", f'write a list: ["{value}"]' if isinstance(value, str) else "")
    return tuple(value)


def choice(words: Sequence[str]) -> Rule:
    """Take one of several words."""

    def read(node: Located) -> str:
        value = node.value
        if not isinstance(value, str) or value not in words:
            raise Unusable(" or ".join(words), did_you_mean(value, words) if isinstance(value, str) else "")
        return value

    return read


def any_word(words: Sequence[str]) -> Rule:
    """Take one of several words, whose case does not matter."""

    def read(node: Located) -> str:
        word = written(node)
        if word.lower() not in words:
            raise Unusable(" or ".join(words), did_you_mean(word, words))
        return word.lower()

    return read


def _bounded(lowest: int | None, highest: int | None) -> str:
    bounds = "" if lowest is None else f" of {lowest} or more" if highest is None else f" of {lowest} to {highest}"
    return f"a whole number{bounds}"


def _number(value: Any) -> float | None:
    """Read a number in any spelling; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
