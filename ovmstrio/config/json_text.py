"""JSON with the place of every value, so that a complaint about a configuration can name its line.

The standard decoder reads strings and numbers; only the nesting is walked here, because it is the nesting whose
places the standard decoder forgets.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Final

from ovmstrio.config.located import Document, InvalidSyntax, Located, below

__all__ = ["parse_json"]

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_NEWLINE: Final = re.compile(r"\n")
_MAX_DEPTH: Final = 100

_REASONS: Final = {
    "Unterminated string starting at": "this string has no closing quote",
    "Invalid control character at": "a line break or control character is inside a string",
    "Invalid \\escape": "this backslash begins no escape of JSON",
    "Invalid \\uXXXX escape": "\\u needs four hexadecimal digits",
}


def parse_json(text: str) -> Document:
    """Parse a whole text.

    Raises:
        InvalidSyntax: it is not JSON, or nested too deep to be a configuration.
    """
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
        if depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} levels of nesting")
        self._skip_blank()
        if self._take("{"):
            return Located(self._members(path, depth), line, path)
        if self._take("["):
            return Located(self._items(path, depth), line, path)
        return Located(self._scalar("a value"), line, path)

    def _members(self, path: str, depth: int) -> dict[str, Located]:
        members: dict[str, Located] = {}
        if self._take("}"):
            return members
        while True:
            line = self._next_line()
            if not self.text.startswith('"', self.position):
                raise self._error("expected a key in double quotes")
            key = str(self._scalar("a key"))
            self._expect(":", f'after the key "{key}"')
            member = self._value(below(path, key), line, depth + 1)
            if key in members:
                self.repeated.append(member)
            members.setdefault(key, member)
            if not self._goes_on("}"):
                return members

    def _items(self, path: str, depth: int) -> list[Located]:
        items: list[Located] = []
        if self._take("]"):
            return items
        while True:
            items.append(self._value(f"{path}[{len(items)}]", self._next_line(), depth + 1))
            if not self._goes_on("]"):
                return items

    def _goes_on(self, closing: str) -> bool:
        if self._take(closing):
            return False
        self._expect(",", f'or "{closing}"')
        self._skip_blank()
        if self.text.startswith(closing, self.position):
            raise self._error(f'a comma stands before "{closing}"', "remove the comma")
        return True

    def _scalar(self, wanted: str) -> Any:
        try:
            value, self.position = self._decoder.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            reason = _REASONS.get(error.msg)
            # Problems inside a string are told by the place of the character, anything else by where the value is.
            at = error.pos if reason else self.position
            raise self._error(reason or f"expected {wanted}", at=min(at, len(self.text))) from None
        except ValueError as error:
            raise self._error(str(error)) from None
        return value

    def _expect(self, character: str, context: str) -> None:
        if not self._take(character):
            raise self._error(f'expected "{character}" {context}')

    def _take(self, character: str) -> bool:
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
            suggestion = "JSON strings stand in double quotes"
        before = (
            f", found {rest!r}" if rest else ", found the end of the " + ("line" if at < len(self.text) else "file")
        )
        return InvalidSyntax(message + before, self._line(at), suggestion)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
