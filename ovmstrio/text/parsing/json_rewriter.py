"""Rewriting of values in model output as JSON, while they arrive.

Models write values with faults: other quotes, unescaped quotes and line breaks in strings, ``=`` for ``:``, missing or
surplus commas and brackets.  Valid JSON passes unchanged.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ovmstrio.text.parsing.parser import WHITESPACE, Cursor, MalformedText, Markers, OnText, Steps

_MAX_DEPTH: Final = 64
_MAX_WORD: Final = 1 << 16
_MAX_KEY: Final = 80
_NUMBER: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_CONSTANTS: Final[Mapping[str, str]] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_IS_NUMBER: Final = re.compile(_NUMBER)
_IS_WORD: Final = re.compile(r"[\w.+-]+")
_NEXT_KEY: Final = re.compile(r"""(?:<\|"\|>|["'])?[\w.$-]+(?:<\|"\|>|["'])?\s*[:=]""")
_KEY_STOP: Final = re.compile(r"""[^\w.$"'-]""")
_QUOTED_KEY: Final = re.compile(r"""(["'])[\w.$-]+\1""")
_SCALAR_BEFORE_KEY: Final = re.compile(rf"({_NUMBER}|{'|'.join(_CONSTANTS)})\s+{_NEXT_KEY.pattern}")
_ESCAPES: Final[Mapping[str, str]] = {letter: f"\\{letter}" for letter in '"\\/bfnrt'} | {"'": "'", "\n": "\\n"}
_PYTHON_ESCAPES: Final[Mapping[str, str]] = {**_ESCAPES, "/": "\\\\/", "0": "\\u0000", "\n": ""}
_CODES: Final[Mapping[str, int]] = {"x": 2, "u": 4, "U": 8}
_HEX: Final = re.compile(r"[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation of values.

    Attributes:
        quotes: string delimiters, the longest first.
        brackets: opening brackets.
        streams: whether the JSON is sent as it arrives, and keeps text without meaning; otherwise, such text raises
            ``MalformedText``, and separators are those of ``json.dumps``.
        python: whether escapes are Python's, and unquoted strings are single words.
    """

    quotes: tuple[str, ...]
    brackets: str
    streams: bool = False
    python: bool = False


JSON: Final = Notation(('"', "'"), "{[", streams=True)
PYTHON: Final = Notation(('"""', "'''", '"', "'"), "{[(", python=True)
GEMMA: Final = Notation(('<|"|>', '"', "'"), "{[(")
_CLOSING: Final[Mapping[str, str]] = {"{": "}", "[": "]", "(": ")"}
_QUOTES: Final = {quote: Markers((quote, "\\")) for notation in (JSON, PYTHON) for quote in notation.quotes}
_STOPS: Final = [
    (re.compile(rf"[,:={{}}\[\]{parentheses}\"'<\n]"), re.compile(rf"[,{{}}\[\]{parentheses}<\n]"))
    for parentheses in ("", "()")
]
"""Ends of a key and of a word without quotes, without and with parentheses as brackets."""
_RAW_QUOTE: Final = '<|"|>'
_RAW_QUOTE_END: Final = Markers((_RAW_QUOTE,))


class _Next(Enum):
    """The next part of an object or array."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


@dataclass(slots=True)
class _Open:
    """An open object or array: its closing bracket in the text and in the JSON."""

    closing: str
    json_closing: str
    is_object: bool
    next: _Next


class JsonRewriter:
    """Rewriter of one value as JSON.

    Args:
        tape: the text.
        notation: notation of the value.
        give: takes the JSON.
        ends: markers that end an incomplete value.
    """

    def __init__(self, tape: Cursor, notation: Notation, give: OnText, ends: Markers) -> None:
        self._tape: Final = tape
        self._notation: Final = notation
        self._give: Final = give
        self._ends: Final = ends
        self._key_stops, self._word_stops = _STOPS["(" in notation.brackets]
        self._open: Final[list[_Open]] = []
        self._comma = False
        self._blanks = ""

    def value(self, opened: str = "") -> Steps[bool]:
        """Rewrite a value; ``opened`` is the already consumed bracket of an object.

        Returns:
            True if the value is complete.

        Raises:
            MalformedText: the text is no value, unless the notation streams.
        """
        if opened:
            self._begin(opened, is_object=True)
        while letter := (yield from self._tape.peek()):
            if letter in self._ends.firsts and (yield from self._tape.at(self._ends)):
                is_begun = bool(self._open)
                self.close()
                return is_begun
            if letter in WHITESPACE:
                self._blanks += yield from self._tape.take()
                continue
            yield from self._part(letter)
            if not self._open:
                return True
        return False

    def string(self, *, is_key: bool = False) -> Steps[None]:
        """Rewrite a quoted string.

        Raises:
            MalformedText: no quote is next.
        """
        for quote in self._notation.quotes:
            if (yield from self._tape.accept(quote)):
                yield from self._string(quote, is_key=is_key)
                return
        raise MalformedText

    def close(self) -> None:
        """Emit the missing brackets at the end of the text."""
        while self._open:
            self._end()

    # ------------------------------------------------------------------
    # Objects and arrays
    # ------------------------------------------------------------------

    def _part(self, letter: str) -> Steps[None]:
        tape, top = self._tape, self._open[-1] if self._open else None
        if letter == "," and top is not None:
            yield from tape.take()
            self._separate(top)
        elif top is not None and letter in map(_CLOSING.get, self._notation.brackets):
            yield from tape.take()
            self._close(letter)
        elif top is not None and top.next is _Next.COLON and letter in ":=":
            yield from tape.take()
            if letter == "=":
                yield from tape.accept(">")
            self._give(":" if self._notation.streams and letter == ":" else ": ")
            top.next = _Next.VALUE
        else:
            yield from self._element(letter, top)

    def _element(self, letter: str, top: _Open | None) -> Steps[None]:
        if top is not None and top.next is _Next.COLON:
            if self._notation.python:
                raise MalformedText
            self._give(": ")
            top.next = _Next.VALUE
        while top is not None and not top.is_object and self._comma and (yield from self._is_outer_key(letter)):
            self._end()  # the bracket of the array is missing
            top = self._open[-1]
        is_key = top is not None and top.is_object and top.next is not _Next.VALUE
        if letter in self._notation.brackets and top is not None and is_key:
            # A doubled brace: its object is that of the outer brace.
            if letter != "{" or top.next is not _Next.KEY:
                self._require_leniency()
            yield from self._tape.take()
            self._open.append(_Open(_CLOSING[letter], "", True, top.next))
            return
        self._lead(top)
        if letter in self._notation.brackets:
            yield from self._tape.take()
            self._begin(letter, is_object=letter == "{")
            return
        for quote in self._notation.quotes:
            if letter == quote[0] and (yield from self._tape.accept(quote)):
                yield from self._string(quote, is_key=is_key)
                break
        else:
            yield from self._word(is_key=is_key)
        if top is not None:
            top.next = _Next.COLON if is_key else _Next.COMMA

    def _is_outer_key(self, letter: str) -> Steps[bool]:
        """Return whether a key of the object around an array is next, instead of an element of the array."""
        if letter not in {'"', "'"} and not self._notation.python:
            return False
        key = yield from self._tape.run(_KEY_STOP, _MAX_KEY)
        at = yield from self._tape.ahead(len(key))
        after = (yield from self._tape.peek(at + 1))[at:]
        if _QUOTED_KEY.fullmatch(key):
            is_key = after == ":"
        else:
            # An element may be a text that begins like "x=".
            is_key = after == "=" and self._notation.python and letter not in {'"', "'"}
        return is_key and any(each.is_object for each in self._open)

    def _lead(self, top: _Open | None) -> None:
        """Emit the separator before a key, or an element of an array."""
        if top is not None and top.next is _Next.COMMA:
            self._comma = True  # it is missing
        if self._notation.streams:
            self._give("," * self._comma + self._blanks)
        elif self._comma:
            self._give(", ")
        self._comma, self._blanks = False, ""

    def _separate(self, top: _Open) -> None:
        if top.next is not _Next.COMMA and top.is_object and top.next is not _Next.KEY:
            self._complete_pair(top)
        if top.next is _Next.COMMA:
            if self._notation.streams:
                self._give(self._blanks)
            self._comma, self._blanks = True, ""
            top.next = _Next.KEY if top.is_object else _Next.VALUE

    def _complete_pair(self, top: _Open) -> None:
        """Emit a value for a key without one."""
        self._require_leniency()
        self._give(": null" if top.next is _Next.COLON else "null")
        top.next = _Next.COMMA

    def _begin(self, bracket: str, *, is_object: bool) -> None:
        if len(self._open) >= _MAX_DEPTH:
            self._require_leniency()
        self._give("{" if is_object else "[")
        self._open.append(
            _Open(_CLOSING[bracket], "}" if is_object else "]", is_object, _Next.KEY if is_object else _Next.VALUE)
        )

    def _close(self, bracket: str) -> None:
        """Close the innermost object or array with this bracket, and those in it; drop a surplus bracket."""
        if bracket in {each.closing for each in self._open}:
            while self._end().closing != bracket:
                pass

    def _end(self) -> _Open:
        ended = self._open.pop()
        if ended.is_object and ended.next in {_Next.COLON, _Next.VALUE}:
            self._complete_pair(ended)
        if self._notation.streams:
            self._give(self._blanks)
        self._comma, self._blanks = False, ""
        self._give(ended.json_closing)
        if self._open:
            self._open[-1].next = _Next.COMMA if ended.json_closing else ended.next
        return ended

    def _require_leniency(self) -> None:
        if not self._notation.streams:
            raise MalformedText

    # ------------------------------------------------------------------
    # Strings and words
    # ------------------------------------------------------------------

    def _string(self, quote: str, *, is_key: bool) -> Steps[None]:
        tape = self._tape
        self._give('"')
        if quote == _RAW_QUOTE:
            if (yield from tape.until(_RAW_QUOTE_END, self._letters)):
                self._give('"')
            return
        while marker := (yield from tape.until(_QUOTES[quote], self._letters)):
            if marker == "\\":
                self._give((yield from self._escape()))
            elif len(quote) > 1 or (yield from self._is_closing(quote, is_key=is_key)):
                self._give('"')
                return
            else:
                self._letters(quote)

    def _letters(self, text: str) -> None:
        self._give(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self) -> Steps[str]:
        """Return the JSON of what follows a backslash."""
        letter = yield from self._tape.take()
        is_python = self._notation.python
        if letter in _CODES:
            digits = yield from self._tape.peek(_CODES[letter])
            if len(digits) == _CODES[letter] and _HEX.fullmatch(digits) and int(digits, 16) <= sys.maxunicode:
                yield from self._tape.take(len(digits))
                character = chr(int(digits, 16))
                is_surrogate = "\ud800" <= character <= "\udfff"
                is_kept = letter == "u" and not is_python
                return f"\\u{digits}" if is_kept else json.dumps(character, ensure_ascii=is_surrogate)[1:-1]
        known = _PYTHON_ESCAPES if is_python else _ESCAPES
        return known.get(letter, "\\\\" + letter if letter else "")

    def _is_closing(self, quote: str, *, is_key: bool) -> Steps[bool]:
        """Return whether a quote ends its string; no value, key or bracket follows a quote within a string."""
        tape = self._tape
        at = yield from tape.ahead()
        letter = (yield from tape.peek(at + 1))[at:]
        if not letter:
            return True
        if letter in self._ends.firsts:
            text = yield from tape.peek(at + self._ends.longest)
            if self._ends.is_next(text, at):
                return True
        top = self._open[-1] if self._open else None
        if is_key:
            return letter in ":=,}{[" or at > 0
        if top is None:
            return letter in ",}]" or (letter == quote and at > 0)
        return (yield from self._follows_value(quote, letter, at, is_object=top.is_object))

    def _follows_value(self, quote: str, letter: str, at: int, *, is_object: bool) -> Steps[bool]:
        """Return whether the text from ``letter`` at ``at`` can follow a value of an object or array."""
        closings = {each.closing for each in self._open}
        if letter in closings:
            return True
        if letter in "}])":
            after = yield from self._tape.ahead(at + 1)
            text = yield from self._tape.peek(after + self._ends.longest)
            return len(text) == after or self._ends.is_next(text, after)
        if not is_object:
            return letter == "," or (letter in {quote, "{", "["} and at > 0)
        if letter == ",":
            at = yield from self._tape.ahead(at + 1)
            if (yield from self._tape.peek(at + 1))[at:] in {"", '"', "'", *closings}:
                return True
        text = yield from self._tape.peek(at + _MAX_KEY)
        return _NEXT_KEY.match(text, at) is not None

    def _word(self, *, is_key: bool) -> Steps[None]:
        word = yield from self._unquoted(is_key=is_key)
        text = word.strip()
        if self._notation.streams:
            self._blanks = word[len(word.rstrip()) :]
            if not is_key and not (yield from self._tape.peek()):
                self._give(text)  # the text is cut
                return
        if not is_key and (text in _CONSTANTS or _IS_NUMBER.fullmatch(text)):
            self._give(_CONSTANTS.get(text, text))
            return
        if self._notation.python and not _IS_WORD.fullmatch(text):
            raise MalformedText
        if text[-1:] in {'"', "'"} and text.count(text[-1]) == 1:
            text = text[:-1]  # the first quote is missing
        self._give(json.dumps(text, ensure_ascii=False))

    def _unquoted(self, *, is_key: bool) -> Steps[str]:
        tape, word = self._tape, ""
        while True:
            run = yield from tape.run(self._key_stops if is_key else self._word_stops, _MAX_WORD)
            if not is_key and not word and (found := _SCALAR_BEFORE_KEY.match(run)):
                run = found[1]
            word += yield from tape.take(len(run))
            letter = yield from tape.peek()
            if letter != "<" or len(word) > _MAX_WORD or (yield from tape.at(self._ends)):
                break
            word += yield from tape.take()
        if word and letter in {'"', "'"}:
            at = yield from tape.ahead(1)
            if (yield from tape.peek(at + 1))[at:] in {":", "="}:
                word += yield from tape.take()
        if not word:
            self._require_leniency()
            word = yield from tape.take()
        return word


def rewrite(text: str, notation: Notation) -> str | None:
    """Return the JSON of a text that is one object or array, with missing brackets; None if it is not."""
    tape, kept = Cursor(), list[str]()
    tape.add(text.strip())
    tape.end()

    def read() -> Steps[bool]:
        rewriter = JsonRewriter(tape, notation, kept.append, Markers(()))
        if not (yield from rewriter.value()):
            rewriter.close()
        return not (yield from tape.peek())

    try:
        next(read())
    except MalformedText:
        return None
    except StopIteration as ended:
        return "".join(kept) if ended.value else None
    return None
