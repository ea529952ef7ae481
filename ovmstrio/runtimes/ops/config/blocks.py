"""One block of ``config.yml``: its keys are read by their rules, and what is wrong is noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ovmstrio.config.findings import Findings, did_you_mean, shown
from ovmstrio.config.json_locations import Located
from ovmstrio.runtimes.ops.config.rules import BLOCKS, RENAMED, WITHOUT_EFFECT
from ovmstrio.runtimes.ops.config.values import Unusable, Value

__all__ = ["Block", "Notes"]


@dataclass(slots=True)
class Notes:
    """What is wrong with a file, and which of its keys have no effect here, with the reasons."""

    findings: Findings
    without_effect: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping of the file; a block that has no value is an empty one.

    Attributes:
        name: what kind of block it is, empty for the whole file.
        node: the mapping.
        notes: where to note what is wrong.
    """

    name: str
    node: Located
    notes: Notes

    @property
    def members(self) -> dict[str, Located]:
        """What is given, by the usual spelling of each key; keys without a value are not given."""
        renamed = RENAMED.get(self.name, {})
        given = self.node.value if isinstance(self.node.value, dict) else {}
        return {renamed.get(key, key): each for key, each in given.items() if each.value is not None}

    @property
    def names(self) -> list[str]:
        """Every key, those without a value too."""
        return list(self.node.value) if isinstance(self.node.value, dict) else []

    def read(self, rules: Mapping[str, Value]) -> dict[str, Any]:
        """Give the values that can be used, and note the others and unknown keys."""
        values = {}
        for key, member in self.members.items():
            if key in rules:
                try:
                    values[key] = rules[key](member.plain())
                except Unusable as error:
                    self._refuse(member, error)
                reason = WITHOUT_EFFECT.get(self.name, {}).get(key)
                if reason:
                    self.notes.without_effect[member.path] = reason
        self._warn_unknown([*rules, *BLOCKS.get(self.name, ())])
        return values

    def block(self, key: str, name: str = "") -> Block:
        """Give an inner block, an empty one where there is none; anything but a mapping is noted."""
        node = self.members.get(key) or Located({}, self.node.line, self.node.path)
        if not isinstance(node.value, dict):
            self._refuse(node, Unusable("a mapping of keys to values"))
        return Block(name or key, node, self.notes)

    def _refuse(self, node: Located, error: Unusable) -> None:
        self.notes.findings.refuse(
            node,
            "the value cannot be used",
            expected=error.expected,
            found=shown(node.plain()),
            suggestion=error.suggestion,
        )

    def _warn_unknown(self, known: list[str]) -> None:
        for key, member in self.members.items():
            if key not in known:
                hint = did_you_mean(str(key), known, otherwise=f"known are {', '.join(known)}")
                self.notes.findings.warn(member, f"unknown key {key!r}, which has no effect", hint)
