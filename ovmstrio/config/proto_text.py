"""Protobuf text format as a tree in which everything knows its place, whatever it means.

Protobuf's own parser says what a file means; this one only says where it says so, and goes on where that would stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from ovmstrio.config.located import InvalidSyntax

__all__ = ["ProtoField", "ProtoMessage", "ProtoScalar", "ProtoValue", "parse_proto"]

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s+|\#[^\n]*)+)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
      | (?P<number>\.?[0-9](?:[eE][+-]|[0-9A-Za-z_.])*)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>[{}<>\[\]:,;/.\-])""",
    re.VERBOSE,
)
_CLOSING: Final = {"{": "}", "<": ">"}
_DEEPEST: Final = 60


@dataclass(frozen=True, slots=True)
class ProtoScalar:
    """A value that is no message, as written; strings that follow each other are one, with their quotes."""

    text: str
    kind: Literal["string", "number", "word"]
    line: int


@dataclass(frozen=True, slots=True)
class ProtoMessage:
    """What stands between braces; ``line`` is that of the opening one."""

    fields: tuple[ProtoField, ...]
    line: int


ProtoValue = ProtoScalar | ProtoMessage


@dataclass(frozen=True, slots=True)
class ProtoField:
    """A field with its values: one, or those of a list.

    ``bracketed``: the name is that of an extension or type, without blanks.  ``start`` and ``end`` are its place in the
    text, with what separates it from the next.
    """

    name: str
    bracketed: bool
    values: tuple[ProtoValue, ...]
    is_list: bool
    line: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _ProtoToken:
    kind: str
    text: str
    line: int
    start: int
    end: int


def parse_proto(text: str) -> tuple[ProtoField, ...]:
    """Read a whole text.

    Raises:
        InvalidSyntax: at the first place that cannot be read.
    """
    parser = _ProtoParser(text)
    fields = tuple(parser.fields("", 0))
    parser.finish()
    return fields


def _tokens(text: str) -> Iterator[_ProtoToken]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _unreadable(text, at, line)
        kind = match.lastgroup or ""
        if kind != "space":
            yield _ProtoToken(kind, match[0], line, at, match.end())
        line += match[0].count("\n")
        at = match.end()
    yield _ProtoToken("end", "", line, at, at)


def _unreadable(text: str, at: int, line: int) -> InvalidSyntax:
    if text[at] in "\"'":
        return InvalidSyntax("a string does not end on its line", line, suggestion=f"close it with {text[at]}")
    return InvalidSyntax(f"{text[at]!r} means nothing here", line, suggestion="remove it, or put the value in quotes")


class _ProtoParser:
    def __init__(self, text: str) -> None:
        self._rest = _tokens(text)
        self._next = next(self._rest)
        self._last = self._next

    def finish(self) -> None:
        if self._next.kind != "end":
            raise self._unexpected("the name of a field")

    def fields(self, closing: str, depth: int) -> Iterator[ProtoField]:
        while self._next.kind != "end" and self._next.text != closing:
            yield self._field(depth)

    def _field(self, depth: int) -> ProtoField:
        first = self._next
        bracketed = self._skip("[")
        name = self._bracketed_name() if bracketed else self._word("the name of a field")
        colon = self._skip(":")
        is_list = self._next.text == "["
        if not colon and self._next.text not in {"{", "<", "["}:
            raise self._unexpected(f"a colon or a brace after {name}")
        values = self._list(depth) if is_list else (self._value(depth),)
        if not self._skip(","):
            self._skip(";")
        return ProtoField(name, bracketed, values, is_list, first.line, first.start, self._last.end)

    def _list(self, depth: int) -> tuple[ProtoValue, ...]:
        self._take()
        values: list[ProtoValue] = []
        while self._next.text != "]":
            values.append(self._value(depth))
            if not self._skip(",") and self._next.text != "]":
                raise self._unexpected("a comma or ]")
        self._take()
        return tuple(values)

    def _value(self, depth: int) -> ProtoValue:
        if self._next.text in _CLOSING:
            return self._block(depth + 1)
        token = self._take()
        if token.kind == "string":
            text = token.text
            while self._next.kind == "string":
                text += self._take().text
            return ProtoScalar(text, "string", token.line)
        if token.text == "-" and self._next.kind in {"number", "word"}:
            following = self._take()
            return ProtoScalar(f"-{following.text}", "number", token.line)
        if token.kind == "number":
            return ProtoScalar(token.text, "number", token.line)
        if token.kind == "word":
            return ProtoScalar(token.text, "word", token.line)
        raise self._unexpected("a value", token)

    def _block(self, depth: int) -> ProtoMessage:
        opening = self._take()
        if depth > _DEEPEST:
            raise InvalidSyntax("messages are nested too deeply", opening.line, expected=f"at most {_DEEPEST}")
        closing = _CLOSING[opening.text]
        fields = tuple(self.fields(closing, depth))
        if self._next.text != closing:
            raise InvalidSyntax(
                f"the {opening.text} of line {opening.line} is never closed",
                opening.line,
                suggestion=f"add a {closing}",
            )
        self._take()
        return ProtoMessage(fields, opening.line)

    def _bracketed_name(self) -> str:
        parts = []
        while self._next.kind in {"word", "number"} or self._next.text in {"/", ".", "-"}:
            parts.append(self._take().text)
        if not parts or not self._skip("]"):
            raise self._unexpected("[type.googleapis.com/package.Type] or [package.Type.extension]")
        return "".join(parts)

    def _word(self, expected: str) -> str:
        if self._next.kind != "word":
            raise self._unexpected(expected)
        return self._take().text

    def _skip(self, text: str) -> bool:
        if self._next.text != text:
            return False
        self._take()
        return True

    def _take(self) -> _ProtoToken:
        self._last = self._next
        if self._last.kind != "end":
            self._next = next(self._rest)
        return self._last

    def _unexpected(self, expected: str, found: _ProtoToken | None = None) -> InvalidSyntax:
        token = found or self._next
        shown = token.text or "the end of the file"
        if token.text in {"}", ">"}:
            return InvalidSyntax(
                f"{shown} closes nothing, or comes too early", token.line, expected=expected, found=shown
            )
        return InvalidSyntax(f"{shown} cannot be read here", token.line, expected=expected, found=shown)
