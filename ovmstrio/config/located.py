"""Values of documents with their positions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ovmstrio.core.errors import Problem


class Place(NamedTuple):
    """A file and the position of settings in it."""

    file: str
    settings: Located

    def of(self, problem: Problem) -> Problem:
        """Return the problem with the file position of its option path."""
        at = self.settings.at(problem.path)
        return replace(problem, file=self.file, line=at.line, path=at.path)

    def __str__(self) -> str:
        return f"{self.file}:{self.settings.line}"


NO_LINE: Final = 0
"""Line of values that are in no file."""


_STEP: Final = re.compile(r'\[("(?:[^"\\]|\\.)*"|\d+)\]|([^.\[]+)')
_PLAIN_KEY: Final = re.compile(r"[\w-]+")


class InvalidSyntax(ValueError):
    """Syntax error with line and, if known, a suggestion."""

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
    """A value with its source position; objects are dictionaries and lists are lists of :class:`Located`.

    ``line`` counts from 1; members of an object have the line of their key.  ``path`` is empty at the root.  ``text``
    is
    the source of a YAML scalar: ``3.10`` is the number 3.1.
    """

    value: Any
    line: int = NO_LINE
    path: str = ""
    text: str = ""

    @property
    def members(self) -> dict[Any, Located]:
        """Members of an object; empty for other values."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self, sequence: type[list[Any] | tuple[Any, ...]] = list) -> Any:
        """Return the value without positions, its lists as ``sequence``."""
        if isinstance(self.value, dict):
            return {key: member.plain(sequence) for key, member in self.value.items()}
        if isinstance(self.value, list):
            return sequence(item.plain(sequence) for item in self.value)
        return self.value

    def find(self, *steps: str | int) -> Located:
        """Return the deepest existing value along keys and indices."""
        node = self
        for step in steps:
            members = dict(enumerate(node.value)) if isinstance(node.value, list) else node.value
            if not isinstance(members, dict) or step not in members:
                break
            node = members[step]
        return node

    def at(self, path: str) -> Located:
        """Return the deepest existing value along a path such as ``shape["a b"][0]``."""
        steps = _STEP.findall(path)
        return self.find(*(json.loads(quoted) if quoted else key for quoted, key in steps))

    def items(self, key: str) -> list[Located]:
        """Return the items of a list member; empty if missing."""
        return self.members[key].value if key in self.members else []


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document; ``repeated`` are members with a duplicate key (the first one is used)."""

    root: Located
    repeated: tuple[Located, ...] = ()


def member_path(path: str, key: str) -> str:
    """Return the path of a member of the object at ``path``."""
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{json.dumps(key)}]"
    return f"{path}.{key}" if path else key


def with_paths(value: Any, path: str = "") -> Located:
    """Return plain values with paths but without lines."""
    if isinstance(value, Mapping):
        return Located(
            {key: with_paths(each, member_path(path, str(key))) for key, each in value.items()}, NO_LINE, path
        )
    if isinstance(value, list | tuple):
        return Located([with_paths(each, f"{path}[{i}]") for i, each in enumerate(value)], NO_LINE, path)
    return Located(value, NO_LINE, path)
