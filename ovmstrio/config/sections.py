"""One mapping of a file: its members are read by rules, and what is wrong with them is noted.

A key without a value counts as not given; an unknown one is passed over with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from ovmstrio.config.findings import Findings, shown, suggest_key
from ovmstrio.config.located import Located
from ovmstrio.config.value_rules import Rules, Unusable

__all__ = ["Section"]

_MAPPING: Final = "a mapping of keys to values"


@dataclass(frozen=True, slots=True)
class Section:
    """The members of a mapping.

    Attributes:
        node: the mapping; anything else has been noted as wrong, and has no members.
        findings: what is wrong in the file.
    """

    node: Located
    findings: Findings

    @property
    def members(self) -> dict[Any, Located]:
        """What is given, without keys that have no value."""
        return {key: member for key, member in self.node.members.items() if member.value is not None}

    def read(self, rules: Rules, required: Iterable[str] = ()) -> dict[str, Any]:
        """Give the values that can be used, and note the others, unknown keys and missing ones."""
        self._check_keys(rules, required)
        values = {}
        for key, member in self.members.items():
            rule = rules.get(key)
            if rule is not None:
                try:
                    values[key] = rule(member)
                except Unusable as error:
                    self.refuse(key, error.message, expected=error.expected, suggestion=error.suggestion)
        return values

    def refuse(self, key: str, message: str, *, expected: str = "", suggestion: str = "") -> None:
        """Note what is wrong with a member, or a contradiction in which it takes part."""
        at = self.node.find(key)
        found = shown(at.plain()) if expected and key in self.members else ""
        self.findings.refuse(at, message, expected=expected, found=found, suggestion=suggestion)

    def warn(self, key: str, message: str, suggestion: str = "") -> None:
        """Note that a member has no effect, or hardly the one that was meant."""
        self.findings.warn(self.node.find(key), message, suggestion)

    def section(self, key: str, wrong: str = "wrong type") -> Section | None:
        """Give a mapping; anything else is noted."""
        if key in self.members and not isinstance(self.members[key].value, dict):
            self.refuse(key, wrong, expected=_MAPPING)
            return None
        return Section(self.members[key], self.findings) if key in self.members else None

    def sections(self, key: str) -> list[Section] | None:
        """Give a list of mappings; anything else is noted, and left out."""
        if key not in self.members:
            return None
        items = self.members[key].value
        if not isinstance(items, list):
            self.refuse(key, "wrong type", expected="a list")
            return None
        for each in items:
            if not isinstance(each.value, dict):
                self.findings.refuse(each, "wrong type", expected=_MAPPING, found=shown(each.plain()))
        return [Section(each, self.findings) for each in items if isinstance(each.value, dict)]

    def _check_keys(self, known: Iterable[str], required: Iterable[str]) -> None:
        unknown = [key for key in self.node.members if key not in known]
        for key in required:
            if key in self.members:
                continue
            # One misspelt key is one mistake, not two.
            misspelt = get_close_matches(key, map(str, unknown), 1)
            unknown = [each for each in unknown if str(each) not in misspelt]
            hint = f"write {key!r} instead of {misspelt[0]!r}" if misspelt else "add it"
            self.findings.refuse(self.node.find(*(misspelt or [key])), f"the key {key!r} is missing", suggestion=hint)
        for key in unknown:
            message = f"unknown key {key!r}, which has no effect"
            self.findings.warn(self.node.find(key), message, suggest_key(key, known))
