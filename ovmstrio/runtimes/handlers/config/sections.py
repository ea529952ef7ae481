"""One mapping of a project's file: its members are asked for by name and type, and what is wrong is noted.

A key without a value counts as not given.  Texts, numbers and flags are taken in any spelling that says the same
(``3.9`` where a text is wanted, ``"8080"`` where a number is).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.findings import Findings, did_you_mean, shown
from ovmstrio.config.json_locations import Located

__all__ = ["Section", "is_file", "is_folder", "local_path"]

_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_VALUE: Final = "the value cannot be used"


def local_path(directory: Path, text: str) -> Path:
    """Give the path that leads on from a directory, without ``..``; links stay, for they may lead elsewhere later."""
    return Path(os.path.normpath(directory / text))


def is_file(path: Path) -> bool:
    """Tell whether there is a file that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder that can be seen; no path is too strange to ask."""
    with suppress(OSError):
        return path.is_dir()
    return False


@dataclass(frozen=True, slots=True)
class Section:
    """The members of a mapping.

    Attributes:
        node: the mapping; anything else has been noted as wrong, and has no members.
        findings: what is wrong in the file.
        texts: how each scalar of the file is written, by its path.
    """

    node: Located
    findings: Findings
    texts: Mapping[str, str]

    @property
    def members(self) -> dict[Any, Located]:
        """What is given, without keys that have no value."""
        given = self.node.value if isinstance(self.node.value, dict) else {}
        return {key: member for key, member in given.items() if member.value is not None}

    def warn_unknown(self, known: Sequence[str], required: Sequence[str] = ()) -> None:
        """Note keys that nobody knows, and required ones that are missing; a misspelt one of these is one mistake."""
        unknown = (
            [key for key in self.node.value or () if key not in known] if isinstance(self.node.value, dict) else []
        )
        missing = [key for key in required if key not in self.members]
        for key in missing:
            misspelt = get_close_matches(key, [each for each in map(str, unknown) if each not in known], 1)
            unknown = [each for each in unknown if str(each) not in misspelt]
            hint = f"write {key!r} instead of {misspelt[0]!r}" if misspelt else "add it"
            self.findings.refuse(self.node.find(*(misspelt or [key])), f"the key {key!r} is missing", suggestion=hint)
        for key in unknown:
            hint = did_you_mean(str(key), known, otherwise=f"known are {', '.join(known)}")
            self.findings.warn(self.node.find(key), f"unknown key {key!r}, which has no effect", hint)

    def refuse(self, key: str, message: str, *, expected: str = "", suggestion: str = "") -> None:
        """Note a contradiction in which a key takes part."""
        at = self.node.find(key)
        found = shown(at.plain()) if expected and key in self.members else ""
        self.findings.refuse(at, message, expected=expected, found=found, suggestion=suggestion)

    def section(self, key: str) -> Section | None:
        """Give a mapping; anything else is noted."""
        node = self.members.get(key)
        if node is None:
            return None
        if not isinstance(node.value, dict):
            self.refuse(key, "wrong type", expected="a mapping of keys to values")
            return None
        return Section(node, self.findings, self.texts)

    def items(self, key: str) -> list[Section] | None:
        """Give a list of mappings; anything else is noted."""
        node = self.members.get(key)
        if node is None:
            return None
        if not isinstance(node.value, list):
            self.refuse(key, "wrong type", expected="a list")
            return None
        sections = [Section(item, self.findings, self.texts) for item in node.value]
        for each in sections:
            if not isinstance(each.node.value, dict):
                found = shown(each.node.plain())
                self.findings.refuse(each.node, "wrong type", expected="a mapping of keys to values", found=found)
        return sections

    def text(self, key: str) -> str | None:
        """Give a scalar as it is written, which is not empty."""
        node = self.members.get(key)
        if node is None:
            return None
        text = self.texts.get(node.path, "").strip()
        if isinstance(node.value, dict | list) or not text or "\0" in text:
            self.refuse(key, _VALUE, expected="a text that is not empty")
            return None
        return text

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """Give one of several words, whose case does not matter."""
        text = self.text(key)
        if text is None or text.lower() in choices:
            return text if text is None else text.lower()
        self.refuse(key, _VALUE, expected=" or ".join(choices), suggestion=did_you_mean(text, choices))
        return None

    def flag(self, key: str) -> bool:
        """Give a truth value, false if there is none."""
        node = self.members.get(key)
        if node is None or isinstance(node.value, bool):
            return node is not None and node.value
        if isinstance(node.value, str) and node.value.lower() in _FLAGS:
            return _FLAGS[node.value.lower()]
        self.refuse(key, _VALUE, expected="true or false")
        return False

    def whole(self, key: str, lowest: int, highest: int | None = None) -> int | None:
        """Give a whole number within bounds."""
        node = self.members.get(key)
        if node is None:
            return None
        number = _number(node.value)
        if number is None or not number.is_integer() or not lowest <= number <= (highest or math.inf):
            bounds = f"of {lowest} to {highest}" if highest else f"of {lowest} or more"
            self.refuse(key, _VALUE, expected=f"a whole number {bounds}")
            return None
        return int(number)

    def seconds(self, key: str) -> float | None:
        """Give a time above 0."""
        node = self.members.get(key)
        if node is None:
            return None
        number = _number(node.value)
        if number is None or not 0 < number < math.inf:
            self.refuse(key, _VALUE, expected="a number of seconds above 0")
            return None
        return number


def _number(value: Any) -> float | None:
    """Read a number in any spelling; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
