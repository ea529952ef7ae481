"""Validation of YAML mappings by rules per key.

A key without value counts as missing; unknown keys are ignored with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_type_hints

from ovmstrio.config.documents import Findings, did_you_mean, suggest_key, to_short_json
from ovmstrio.config.located import Located

Rule = Callable[[Located], Any]
"""Converts a value, or raises Unusable."""

Rules = Mapping[str, Rule | None]
"""Rules by key; keys of nested mappings and lists have None."""

_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class InvalidValue(ValueError):
    """Invalid value of a key."""

    def __init__(self, expected: str, suggestion: str = "", *, message: str = "the value cannot be used") -> None:
        super().__init__(expected)
        self.message = message
        self.expected = expected
        self.suggestion = suggestion


@cache
def rules_of(settings: type) -> Mapping[str, Rule]:
    """Return rules by field of a settings class; fields without a rule are not keys."""
    hints = get_type_hints(settings, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: rules[0] for name, rules in metadata.items() if rules}


def integer(lowest: int | None = None, highest: int | None = None, *also: int) -> Rule:
    """Return the rule for an integer within bounds, or one of ``also``."""
    bounds = "" if lowest is None else f" of {lowest} or more" if highest is None else f" of {lowest} to {highest}"
    expected = " or ".join([f"a whole number{bounds}", *map(str, also)])

    def read(node: Located) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int):
            quoted = isinstance(value, str) and value.strip().lstrip("-").isdigit()
            raise InvalidValue(expected, "remove the quotes" if quoted else "")
        inside = (lowest is None or value >= lowest) and (highest is None or value <= highest)
        if not inside and value not in also:
            raise InvalidValue(expected)
        return value

    return read


def number(above: float, what: str = "a number") -> Rule:
    """Return the rule for a number above a bound; ``what`` describes it."""

    def read(node: Located) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise InvalidValue(f"{what} above {above:g}")
        try:
            return float(value)
        except OverflowError:
            raise InvalidValue(f"{what} above {above:g}") from None

    return read


def boolean(node: Located) -> bool:
    """Convert a boolean."""
    if not isinstance(node.value, bool):
        quoted = str(node.value).lower() in {"true", "false"}
        raise InvalidValue("true or false", "remove the quotes" if quoted else "")
    return node.value


def string_value(node: Located) -> str:
    """Convert a string."""
    if not isinstance(node.value, str):
        is_scalar = isinstance(node.value, int | float)
        raise InvalidValue("a text", f'put it in quotes: "{node.value}"' if is_scalar else "")
    return node.value


def nonempty_str(node: Located) -> str:
    """Convert a non-empty YAML scalar to its source text."""
    given = node.text.strip()
    if isinstance(node.value, dict | list) or not given or "\0" in given:
        raise InvalidValue("a text that is not empty")
    return given


def string_list(node: Located) -> tuple[str, ...]:
    """Convert a list of strings."""
    value = node.plain()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidValue("a list of texts", f'write a list: ["{value}"]' if isinstance(value, str) else "")
    return tuple(value)


def choice(words: Sequence[str]) -> Rule:
    """Return the rule for one of several words."""

    def read(node: Located) -> str:
        value = node.value
        if not isinstance(value, str) or value not in words:
            raise InvalidValue(" or ".join(words), did_you_mean(value, words) if isinstance(value, str) else "")
        return value

    return read


def choice_ci(words: Sequence[str]) -> Rule:
    """Return the rule for one of several words, case-insensitive."""

    def read(node: Located) -> str:
        word = nonempty_str(node)
        if word.lower() not in words:
            raise InvalidValue(" or ".join(words), did_you_mean(word, words))
        return word.lower()

    return read


def lenient(rule: Rule) -> Rule:
    """Return a rule that also accepts numbers and booleans as strings, such as ``"8080"``."""

    def read(node: Located) -> Any:
        value = node.value
        if isinstance(value, str) and value.lower() in _FLAGS:
            value = _FLAGS[value.lower()]
        elif isinstance(value, str | float):
            with suppress(ValueError):
                value = float(value)
                value = int(value) if value.is_integer() else value
        return rule(replace(node, value=value))

    return read


_MAPPING: Final = "a mapping of keys to values"


@dataclass(frozen=True, slots=True)
class Section:
    """Members of a mapping.

    Attributes:
        node: the mapping; other values were reported and have no members.
    """

    node: Located
    findings: Findings

    @property
    def members(self) -> dict[Any, Located]:
        """Members with a value."""
        return {key: member for key, member in self.node.members.items() if member.value is not None}

    def read(self, rules: Rules, required: Iterable[str] = ()) -> dict[str, Any]:
        """Return the valid values; report invalid, unknown and missing keys."""
        self._check_keys(rules, required)
        values = {}
        for key, member in self.members.items():
            rule = rules.get(key)
            if rule is not None:
                try:
                    values[key] = rule(member)
                except InvalidValue as error:
                    self.refuse(key, error.message, expected=error.expected, suggestion=error.suggestion)
        return values

    def refuse(self, key: str, message: str, *, expected: str = "", suggestion: str = "") -> None:
        """Report a fatal problem of a member."""
        at = self.node.find(key)
        found = to_short_json(at.plain()) if expected and key in self.members else ""
        self.findings.refuse(at, message, expected=expected, found=found, suggestion=suggestion)

    def warn(self, key: str, message: str, suggestion: str = "") -> None:
        """Report a warning for a member."""
        self.findings.warn(self.node.find(key), message, suggestion)

    def section(self, key: str, wrong: str = "wrong type") -> Section | None:
        """Return a nested mapping; report other values."""
        if key in self.members and not isinstance(self.members[key].value, dict):
            self.refuse(key, wrong, expected=_MAPPING)
            return None
        return Section(self.members[key], self.findings) if key in self.members else None

    def sections(self, key: str) -> list[Section] | None:
        """Return a list of mappings; report and omit other items."""
        if key not in self.members:
            return None
        items = self.members[key].value
        if not isinstance(items, list):
            self.refuse(key, "wrong type", expected="a list")
            return None
        for each in items:
            if not isinstance(each.value, dict):
                self.findings.refuse(each, "wrong type", expected=_MAPPING, found=to_short_json(each.plain()))
        return [Section(each, self.findings) for each in items if isinstance(each.value, dict)]

    def _check_keys(self, known: Iterable[str], required: Iterable[str]) -> None:
        unknown = [key for key in self.node.members if key not in known]
        for key in required:
            if key in self.members:
                continue
            # A misspelt key is reported once.
            misspelt = get_close_matches(key, map(str, unknown), 1)
            unknown = [each for each in unknown if str(each) not in misspelt]
            hint = f"rename {misspelt[0]!r} to {key!r}" if misspelt else "add it"
            self.findings.refuse(self.node.find(*(misspelt or [key])), f"the key {key!r} is missing", suggestion=hint)
        for key in unknown:
            message = f"unknown key {key!r}, ignored"
            self.findings.warn(self.node.find(key), message, suggest_key(key, known))
