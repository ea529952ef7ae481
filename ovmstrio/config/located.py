"""The one model of configuration files: JSON, YAML and protobuf's text format are all read into located values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ovmstrio.core.errors import Problem

__all__ = ["NO_LINE", "Document", "InvalidSyntax", "Located", "Place", "below", "locate"]


class Place(NamedTuple):
    """The file, and the settings in it."""

    file: str
    settings: Located

    def of(self, problem: Problem) -> Problem:
        """Point a problem, whose path is that of an option, at where the option is written."""
        at = self.settings.find(*problem.path.split("."))
        return replace(problem, file=self.file, line=at.line, path=at.path)


NO_LINE: Final = 0
"""The line of what is in no file."""

_PLAIN_KEY: Final = re.compile(r"[\w-]+")


class InvalidSyntax(ValueError):
    """A text is not in its format; ``line`` says where, ``suggestion`` what to do where that is known."""

    def __init__(
        self, message: str, line: int | None, suggestion: str = "", *, expected: str = "", found: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.suggestion = suggestion
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class Located:
    """A value with its place: objects, mappings and messages are dictionaries of further ones, lists are lists of them.

    ``line`` counts from 1 and is that of the key for a member of an object; ``path`` is empty at the root.  ``text`` is
    how a scalar of YAML is written, which says more than its value: ``3.10`` is the number 3.1.
    """

    value: Any
    line: int = NO_LINE
    path: str = ""
    text: str = ""

    @property
    def members(self) -> dict[Any, Located]:
        """What an object holds; nothing, of anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> Any:
        """Give the value without places, as the standard decoder would."""
        if isinstance(self.value, dict):
            return {key: member.plain() for key, member in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def find(self, *steps: str | int) -> Located:
        """Follow keys and indices as far as they exist; gives the deepest value reached."""
        node = self
        for step in steps:
            members = dict(enumerate(node.value)) if isinstance(node.value, list) else node.value
            if not isinstance(members, dict) or step not in members:
                break
            node = members[step]
        return node

    def items(self, key: str) -> list[Located]:
        """Give the items of a member that is a list; none if there is no such member."""
        return self.members[key].value if key in self.members else []


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed text; ``repeated`` are members whose key their object had already (the first one counts)."""

    root: Located
    repeated: tuple[Located, ...] = ()


def below(path: str, key: str) -> str:
    """Give the path of a member of the object at ``path``."""
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{json.dumps(key)}]"
    return f"{path}.{key}" if path else key


def locate(value: Any, path: str = "") -> Located:
    """Give plain values the places that they have inside of one another, on no line."""
    if isinstance(value, Mapping):
        return Located({key: locate(each, below(path, str(key))) for key, each in value.items()}, NO_LINE, path)
    if isinstance(value, list | tuple):
        return Located([locate(each, f"{path}[{i}]") for i, each in enumerate(value)], NO_LINE, path)
    return Located(value, NO_LINE, path)
