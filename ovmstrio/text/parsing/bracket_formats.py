"""Output formats with call syntax of a programming language (LFM, Gemma); a call is emitted when it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ovmstrio.text.parsing.parser import BoundedText, Brackets, MalformedText, Markers, Steps, StreamingParser

_MAX_DEPTH: Final = 64
_BLANKS: Final = re.compile(r"\s*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![\w.])")
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_BARE: Final = re.compile(r"[^,{}\[\]<]+")
_CONSTANTS: Final[Mapping[str, bool | None]] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_ESCAPES: Final[Mapping[str, str]] = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CODES: Final[Mapping[str, int]] = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation of values.

    Attributes:
        quotes: string delimiters.
        escapes: whether backslashes in strings have Python's meaning.
        bare: whether keys and strings may be unquoted.
    """

    quotes: tuple[str, ...]
    escapes: bool
    bare: bool


class LiteralParser:
    """Parser of values in a complete text."""

    def __init__(self, text: str, notation: Notation) -> None:
        self._text: Final = text
        self._notation: Final = notation
        self._at = 0

    def keywords(self) -> dict[str, Any]:
        """Parse ``name=value, ...``.

        Raises:
            ValueError: the text is malformed.
        """
        found: dict[str, Any] = {}
        while not self._ended():
            name = self._match(_WORD)
            self._expect("=")
            _put(found, name, self._value(0))
            if not self._ended():
                self._expect(",")
        return found

    def mapping(self) -> dict[str, Any]:
        """Parse ``{key: value, ...}``.

        Raises:
            ValueError: the text is malformed.
        """
        self._expect("{")
        found = self._mapping(0)
        if not self._ended():
            raise ValueError
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError
        if (quote := self._quote()) is not None:
            return self._quoted(quote)
        if self._accept("{"):
            return self._mapping(depth)
        for opening, closing in ("[]", "()"):
            if self._accept(opening):
                return self._items(closing, depth)
        return self._scalar()

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._accept("}"):
            _put(found, self._key(), self._value(depth + 1))
            if not self._accept(","):
                self._expect("}")
                break
        return found

    def _items(self, closing: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._accept(closing):
            found.append(self._value(depth + 1))
            if not self._accept(","):
                self._expect(closing)
                break
        return found

    def _key(self) -> str:
        if (quote := self._quote()) is not None:
            key = self._quoted(quote)
            self._expect(":")
            return key
        if not self._notation.bare:
            raise ValueError
        end = self._text.find(":", self._at)
        key = self._text[self._at : end].strip()
        if end < 0 or not key:
            raise ValueError
        self._at = end + 1
        return key

    def _scalar(self) -> Any:
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return float(number[0]) if any(letter in ".eE" for letter in number[0]) else int(number[0])
        word = _BARE.match(self._text, self._at) if self._notation.bare else _WORD.match(self._text, self._at)
        if word is None:
            raise ValueError
        self._at = word.end()
        text = word[0].strip()
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if not self._notation.bare:
            raise ValueError
        return text

    def _quote(self) -> str | None:
        self._skip()
        for quote in self._notation.quotes:
            if self._text.startswith(quote, self._at):
                self._at += len(quote)
                return quote
        return None

    def _quoted(self, quote: str) -> str:
        parts: list[str] = []
        while not self._text.startswith(quote, self._at):
            if self._at >= len(self._text):
                raise ValueError
            letter = self._text[self._at]
            self._at += 1
            parts.append(self._escaped() if letter == "\\" and self._notation.escapes else letter)
        self._at += len(quote)
        return "".join(parts)

    def _escaped(self) -> str:
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in _CODES:
            digits = self._text[self._at : self._at + _CODES[letter]]
            self._at += len(digits)
            character = chr(int(digits, 16)) if len(digits) == _CODES[letter] else ""
            character.encode()
            return character
        return _ESCAPES.get(letter, letter if letter in {"\\", "'", '"'} else f"\\{letter}")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError
        self._at = found.end()
        return found[0]

    def _accept(self, literal: str) -> bool:
        self._skip()
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def _expect(self, literal: str) -> None:
        if not self._accept(literal):
            raise ValueError

    def _ended(self) -> bool:
        self._skip()
        return self._at >= len(self._text)

    def _skip(self) -> None:
        self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]


def _put(found: dict[str, Any], key: str, value: Any) -> None:
    if key in found:
        raise ValueError(key)
    found[key] = value


_PYTHON: Final = Brackets("([{", ")]}", ("'", '"'), escapes=True)
_PYTHON_VALUES: Final = Notation(("'", '"'), escapes=True, bare=False)
_GEMMA: Final = Brackets("{[", "}]", ('<|"|>',), escapes=False)
_GEMMA_VALUES: Final = Notation(('<|"|>',), escapes=False, bare=True)
_CALL_BEGIN: Final = Markers(("(",))
_MAPPING_BEGIN: Final = Markers(("{",))


class _CompleteCalls(StreamingParser):
    """Base of formats that emit complete calls."""

    def emit_call(self, name: str, read: Callable[[], dict[str, Any]]) -> None:
        """Emit a call with the arguments that ``read`` returns.

        Raises:
            Malformed: the name or the arguments are invalid.
        """
        name = name.strip()
        try:
            arguments = json.dumps(read(), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise MalformedText from None
        if not name or not all(letter.isalnum() or letter in "_-.:/" for letter in name):
            raise MalformedText
        self.begin_call(name)
        self.out.arguments(arguments)
        self.end_call()


class LiquidParser(_CompleteCalls):
    """``<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>``: LFM 2 and 2.5."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|im_end|>",)

    def call(self) -> Steps[None]:
        """Parse a list of calls and the closing marker."""
        tape = self.tape
        yield from tape.blanks()
        yield from tape.expect("[")
        while True:
            name, _ = yield from tape.short(_CALL_BEGIN)
            kept = BoundedText()
            if not (yield from tape.balanced(_PYTHON, kept, depth=1)):
                raise MalformedText
            text = kept.text[:-1]
            self.emit_call(name, LiteralParser(text, _PYTHON_VALUES).keywords)
            yield from tape.blanks()
            if not (yield from tape.accept(",")):
                break
        yield from tape.expect("]")
        yield from tape.blanks()
        yield from tape.accept("<|tool_call_end|>")


class GemmaParser(_CompleteCalls):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:42}<tool_call|>``: Gemma 4."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    dropped: ClassVar[tuple[str, ...]] = ("<turn|>", "<|tool_response>")

    def call(self) -> Steps[None]:
        """Parse calls up to the closing marker."""
        tape = self.tape
        while True:
            yield from tape.blanks()
            yield from tape.expect("call:")
            name, _ = yield from tape.short(_MAPPING_BEGIN)
            kept = BoundedText()
            if not (yield from tape.balanced(_GEMMA, kept, depth=1)):
                raise MalformedText
            self.emit_call(name, LiteralParser("{" + kept.text, _GEMMA_VALUES).mapping)
            yield from tape.blanks()
            if (yield from tape.accept("<tool_call|>")):
                return
