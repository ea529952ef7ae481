"""Check of regular expressions as xgrammar 0.1.31 reads them: JavaScript's, without lookaround and backreferences."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from ovmstrio.text.grammars.errors import MAX_GRAMMAR_CHARACTERS, GrammarRefused, check_repetition

_COUNT: Final = re.compile(r"\{(\d{1,15})(,(\d{1,15})?)?\}")
_NAME: Final = re.compile(r"<[A-Za-z]+>")
_HEX: Final = re.compile(r"u\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|c[A-Za-z]|U[0-9A-Fa-f]{8}")
_SET_ESCAPES: Final = frozenset("dDwWsS")
_ESCAPABLE: Final = frozenset("^$.*+?\\()[]{}|/-nrtfv0\"'<>=!,:;@#%&~` ")
_UNSUPPORTED_GROUPS: Final = {
    "=": "lookahead",
    "!": "lookahead",
    "<=": "lookbehind",
    "<!": "lookbehind",
}
_MAX_DEPTH: Final = 100
_LAST_CODE_POINT: Final = 0x10FFFF
_SIMPLE_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def check_pattern(pattern: str, path: str = "") -> None:
    """Check a regular expression.

    Raises:
        GrammarRefused: it is invalid or not supported.
    """
    if len(pattern) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(
            path, f"the pattern has {len(pattern)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )
    _PatternChecker(pattern, path).read()


class _PatternChecker:
    def __init__(self, pattern: str, path: str) -> None:
        self._text: Final = pattern
        self._path: Final = path
        self._at = 0

    def read(self) -> None:
        try:
            self._text.encode()
        except UnicodeEncodeError:
            self._refuse("lone surrogates are not supported")
        self._alternatives(0)
        if self._at < len(self._text):
            self._refuse("unmatched ')'")

    def _alternatives(self, depth: int) -> int:
        """Parse up to a closing bracket or the end; return the largest repetition count."""
        if depth > _MAX_DEPTH:
            self._refuse(f"groups nested more than {_MAX_DEPTH} deep")
        most = 1
        branches, filled = 0, False
        while self._at < len(self._text) and self._text[self._at] != ")":
            letter = self._text[self._at]
            if letter == "|":
                if not filled:
                    self._refuse("an alternative is empty; write (...)? for an optional part")
                branches, filled = branches + 1, False
                self._at += 1
                continue
            if letter in "^$":
                self._anchor(letter)
                continue
            most = max(most, self._repeated(depth))
            filled = True
        if branches and not filled:
            self._refuse("an alternative is empty; write (...)? for an optional part")
        return most

    def _anchor(self, letter: str) -> None:
        begin = self._at == 0 or self._text[self._at - 1] in "(|^" or self._text.endswith("(?:", 0, self._at)
        following = self._text[self._at + 1 : self._at + 2]
        if (letter == "^" and not begin) or (letter == "$" and following not in {"", ")", "|", "$"}):
            self._refuse(f"{letter!r} is only supported at the start or end: the pattern must match the entire output")
        if following and following in "*+?{":
            self._refuse(f"{letter!r} cannot be repeated")
        self._at += 1

    def _repeated(self, depth: int) -> int:
        inner = self._atom(depth)
        letter = self._text[self._at : self._at + 1]
        if letter and letter in "*+?":
            self._at += 1
        elif letter == "{":
            inner = self._count(inner)
        else:
            return inner
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1
        if (after := self._text[self._at : self._at + 1]) and after in "*+?{":
            self._refuse("two consecutive repetitions; put the first into a group")
        return inner

    def _count(self, inner: int) -> int:
        found = _COUNT.match(self._text, self._at)
        if found is None:
            self._refuse("expected {3}, {3,} or {3,5}; a literal brace is \\{")
        least = int(found[1])
        most = int(found[3]) if found[3] else least
        if most < least:
            self._refuse(f"{found[0]} has its bounds in the wrong order")
        self._at = found.end()
        return check_repetition(self._path, most, inner)

    def _atom(self, depth: int) -> int:
        letter = self._text[self._at]
        self._at += 1
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            self._class()
        elif letter == "\\":
            self._escape()
        elif letter in "*+?":
            self._at -= 1
            self._refuse(f"nothing to repeat before {letter!r}")
        elif letter == "{":
            self._at -= 1
            self._refuse("nothing to repeat before '{'; a literal brace is \\{")
        return 1

    def _group(self, depth: int) -> int:
        if self._text.startswith("?", self._at):
            self._group_prefix()
        inner = self._alternatives(depth + 1)
        if self._at >= len(self._text):
            self._refuse("a group is not closed")
        self._at += 1
        return inner

    def _group_prefix(self) -> None:
        self._at += 1
        if self._text.startswith(":", self._at):
            self._at += 1
            return
        for sign, kind in _UNSUPPORTED_GROUPS.items():
            if self._text.startswith(sign, self._at):
                self._refuse(f"{kind} is not supported")
        name = _NAME.match(self._text, self._at)
        if name is None:
            self._refuse("expected (...), (?:...) or (?<name>...) with letters; flags are not supported")
        self._at = name.end()

    def _class(self) -> None:
        if self._text.startswith("^", self._at):
            self._at += 1
        first, last, ranged = True, None, False
        while self._at < len(self._text):
            letter = self._text[self._at]
            self._at += 1
            if letter == "]":
                if first:
                    self._refuse("a character class must not be empty; a literal bracket is \\]")
                return
            if letter in "\r\n":
                self._refuse("write a line break as \\n in a class")
            if letter == "-" and not first and last is not None and not self._text.startswith("]", self._at):
                ranged, first = True, False
                continue
            code = self._escape() if letter == "\\" else letter
            if ranged and (last is None or code is None or code < last):
                self._refuse("a character range is reversed")
            last = None if ranged else code
            ranged, first = False, False
        self._refuse("a class is not closed")

    def _escape(self) -> str | None:
        """Parse an escape sequence; return its character, None for a set."""
        letter = self._text[self._at : self._at + 1]
        if not letter:
            self._refuse("trailing backslash")
        if letter in _SET_ESCAPES:
            self._at += 1
            return None
        if found := _HEX.match(self._text, self._at):
            self._at = found.end()
            return self._code_point(found[0])
        self._at += 1
        if letter in "uxcU":
            self._refuse(f"\\{letter} needs digits")
        if letter.isdecimal() and letter != "0":
            self._refuse("backreferences are not supported")
        if letter.isalnum() and letter not in _ESCAPABLE:
            self._refuse(f"\\{letter} is not supported")
        return _SIMPLE_ESCAPES.get(letter, letter)

    def _code_point(self, written: str) -> str:
        if written[0] == "c":
            return chr(ord(written[1]) % 32)
        value = int(written[1:].strip("{}"), 16)
        if value > _LAST_CODE_POINT or value in range(0xD800, 0xE000):
            self._refuse(f"\\{written} is not a character")
        return chr(value)

    def _refuse(self, message: str) -> NoReturn:
        raise GrammarRefused(self._path, f"{message} (position {self._at + 1} of the pattern)")
