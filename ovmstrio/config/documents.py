"""Configuration documents with source positions: JSON parser, located values, and diagnostics."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple

from ovmstrio.core.errors import ConfigError, Problem

# Values


class Place(NamedTuple):
    """A file and the position of settings in it."""

    file: str
    settings: Located

    def of(self, problem: Problem) -> Problem:
        """Return the problem with the file position of its option path."""
        at = self.settings.at(problem.path)
        return replace(problem, file=self.file, line=at.line or None, path=at.path)

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


# Diagnostics

Severity = Literal["error", "warning"]

_SHOWN_CHARACTERS: Final = 80
_MAX_WORD_CHARACTERS: Final = 200
"""Longer words match no key, and comparison time grows with their length."""


def to_short_json(value: Any) -> str:
    """Return a value as truncated JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 4] + " ..."


def did_you_mean(found: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return a "did you mean" hint for a close match, else ``otherwise``."""
    known = list(known)
    if len(found) > _MAX_WORD_CHARACTERS:
        return otherwise
    words = {word.lower(): word for word in known}
    close = get_close_matches(found, known, 1) or [words[word] for word in get_close_matches(found.lower(), words, 1)]
    return f"did you mean {close[0]!r}?" if close else otherwise


def suggest_key(found: Any, known: Iterable[str]) -> str:
    """Return a "did you mean" hint for a key, else the list of known keys."""
    known = list(known)
    return did_you_mean(str(found), known, otherwise=f"known are {', '.join(known)}" if known else "remove it")


def invalid_value_error(
    option: str, found: Any, expected: str, *, message: str = "", suggestion: str = "", severity: Severity = "error"
) -> ConfigError:
    """Return the error of an invalid option value; ``option`` may be a path (``shape.input``)."""
    problem = Problem(
        message or "the value cannot be used",
        path=option,
        expected=expected,
        found=to_short_json(found),
        suggestion=suggestion,
        severity=severity,
    )
    return ConfigError([problem])


UNUSABLE: Final = "the value cannot be used"


class InvalidValue(ValueError):
    """Invalid value, raised by custom checks of fields and schemas."""

    def __init__(self, expected: str, suggestion: str = "", *, message: str = UNUSABLE) -> None:
        super().__init__(expected)
        self.message = message
        self.expected = expected
        self.suggestion = suggestion


@dataclass(slots=True)
class Findings:
    """Diagnostics of one file.

    ``fatal`` problems make the file unusable; ``problems`` are the others, including warnings.
    """

    file: str
    fatal: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, node: Located, message: str, *, expected: str = "", found: str = "", suggestion: str = "") -> None:
        """Add a fatal problem."""
        self.fatal.append(Problem(message, self.file, node.line or None, node.path, expected, found, suggestion))

    def refuse_value(self, node: Located, error: InvalidValue, found: str = "", prefix: str = "") -> None:
        """Add a fatal problem of an invalid value; ``found`` is its text, if the node has no value."""
        found = found or to_short_json(node.plain())
        message, hint = f"{prefix}{error.message}", error.suggestion
        self.refuse(node, message, expected=error.expected, found=found, suggestion=hint)

    def refuse_repeated(self, document: Document, whose: str = " in one object") -> None:
        """Add a fatal problem per duplicate key."""
        for node in document.repeated:
            self.refuse(node, f"the key is given twice{whose}", suggestion="remove one of them")

    def warn(self, node: Located, message: str, suggestion: str = "") -> None:
        """Add a warning."""
        self.problems.append(
            Problem(message, self.file, node.line or None, node.path, suggestion=suggestion, severity="warning")
        )

    def place(self, node: Located, problem: Problem) -> Problem:
        """Return the problem of a part of ``node`` with its file position."""
        return Place(self.file, node).of(problem)

    @property
    def all(self) -> tuple[Problem, ...]:
        """All problems by line."""
        return sorted_by_line([*self.fatal, *self.problems])


def sorted_by_line(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the problems of one file sorted by line."""
    return tuple(sorted(problems, key=lambda problem: problem.line or 0))


# JSON

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_NEWLINE: Final = re.compile(r"\n")
_SURROGATE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Halves of surrogate pairs, without those that Python uses for bytes of paths that are not UTF-8."""
MAX_DEPTH: Final = 100

_REASONS: Final = {
    "Unterminated string starting at": "this string has no closing quote",
    "Invalid control character at": "a line break or control character is inside a string",
    "Invalid \\escape": "invalid escape sequence",
    "Invalid \\uXXXX escape": "\\u needs four hexadecimal digits",
}


def parse_json(text: str) -> Document:
    """Parse a JSON text; raises InvalidSyntax if it is invalid or nested too deeply."""
    scanner = _JsonScanner(text)
    root = scanner.document()
    return Document(root, tuple(scanner.repeated))


@dataclass(slots=True)
class _JsonScanner:
    text: str
    position: int = 0
    repeated: list[Located] = field(default_factory=list)
    _breaks: list[int] = field(init=False)
    _decoder: json.JSONDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._breaks = [match.start() for match in _NEWLINE.finditer(self.text)]
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant)

    def document(self) -> Located:
        root = self._value("", self._next_line(), 0)
        self._skip_blank()
        if self.position < len(self.text):
            raise self._error("expected the end of the file")
        return root

    def _value(self, path: str, line: int, depth: int) -> Located:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels of nesting")
        self._skip_blank()
        if self._accept("{"):
            return Located(self._members(path, depth), line, path)
        if self._accept("["):
            return Located(self._items(path, depth), line, path)
        return Located(self._scalar("a value"), line, path)

    def _members(self, path: str, depth: int) -> dict[str, Located]:
        members: dict[str, Located] = {}
        if self._accept("}"):
            return members
        while True:
            line = self._next_line()
            if not self.text.startswith('"', self.position):
                raise self._error("expected a key in double quotes")
            key = str(self._scalar("a key"))
            self._expect(":", f'after the key "{key}"')
            member = self._value(member_path(path, key), line, depth + 1)
            if key in members:
                self.repeated.append(member)
            members.setdefault(key, member)
            if not self._has_more("}"):
                return members

    def _items(self, path: str, depth: int) -> list[Located]:
        items: list[Located] = []
        if self._accept("]"):
            return items
        while True:
            items.append(self._value(f"{path}[{len(items)}]", self._next_line(), depth + 1))
            if not self._has_more("]"):
                return items

    def _has_more(self, closing: str) -> bool:
        if self._accept(closing):
            return False
        self._expect(",", f'or "{closing}"')
        self._skip_blank()
        if self.text.startswith(closing, self.position):
            raise self._error(f'trailing comma before "{closing}"', "remove the comma")
        return True

    def _scalar(self, wanted: str) -> Any:
        start = self.position
        try:
            value, self.position = self._decoder.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            reason = _REASONS.get(error.msg)
            # Errors within strings are located at the character, others at the value.
            at = error.pos if reason else self.position
            raise self._error(reason or f"expected {wanted}", at=min(at, len(self.text))) from None
        except ValueError as error:
            raise self._error(str(error)) from None
        if isinstance(value, str) and _SURROGATE.search(value):
            raise self._error("half of a surrogate pair is not a character", at=start)
        return value

    def _expect(self, character: str, context: str) -> None:
        if not self._accept(character):
            raise self._error(f'expected "{character}" {context}')

    def _accept(self, character: str) -> bool:
        self._skip_blank()
        if not self.text.startswith(character, self.position):
            return False
        self.position += 1
        return True

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        self.position = self.position if match is None else match.end()

    def _next_line(self) -> int:
        self._skip_blank()
        return self._line(self.position)

    def _line(self, position: int) -> int:
        return bisect_right(self._breaks, position - 1) + 1

    def _error(self, message: str, suggestion: str = "", *, at: int | None = None) -> InvalidSyntax:
        at = self.position if at is None else at
        rest = self.text[at : at + 20].split("\n")[0].strip()
        if not suggestion and rest.startswith(("//", "/*", "#")):
            suggestion = "JSON has no comments: remove it"
        if not suggestion and rest.startswith("'"):
            suggestion = "use double quotes"
        before = (
            f", found {rest!r}" if rest else ", found the end of the " + ("line" if at < len(self.text) else "file")
        )
        return InvalidSyntax(message + before, self._line(at), suggestion)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


# Files


def load_document(content: bytes, file: str) -> Document:
    """Parse the content of a JSON file.

    Raises:
        ConfigError: not UTF-8 or not JSON; the message starts as OVMS's.
    """
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = Problem("The file is not valid json - it is not UTF-8", file, line, found=f"byte {error.start}")
        raise ConfigError([problem]) from None
    except InvalidSyntax as error:
        message = f"The file is not valid json - {error.message}"
        raise ConfigError([Problem(message, file, error.line, suggestion=error.suggestion)]) from None
