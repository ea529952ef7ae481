"""Regular expressions as xgrammar 0.1.31 reads them: those of JavaScript without looks around and references back."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from ovmstrio.text.grammars.refusals import MOST_TEXT, GrammarRefused, limit_repetition

__all__ = ["check_pattern"]

_COUNT: Final = re.compile(r"\{(\d{1,15})(,(\d{1,15})?)?\}")
_NAME: Final = re.compile(r"<[A-Za-z]+>")
_HEX: Final = re.compile(r"u\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|c[A-Za-z]|U[0-9A-Fa-f]{8}")
_SETS: Final = frozenset("dDwWsS")
_PLAIN: Final = frozenset("^$.*+?\\()[]{}|/-nrtfv0\"'<>=!,:;@#%&~` ")
_GROUPS: Final = {
    "=": "looking ahead",
    "!": "looking ahead",
    "<=": "looking behind",
    "<!": "looking behind",
}
_MOST_DEPTH: Final = 100
_LAST_LETTER: Final = 0x10FFFF
_SIMPLE: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def check_pattern(pattern: str, path: str = "") -> None:
    """See that a regular expression can be imposed.

    Raises:
        GrammarRefused: it cannot.
    """
    if len(pattern) > MOST_TEXT:
        raise GrammarRefused(path, f"the pattern has {len(pattern)} letters, where {MOST_TEXT} are the most")
    _Pattern(pattern, path).read()


class _Pattern:
    def __init__(self, pattern: str, path: str) -> None:
        self._text: Final = pattern
        self._path: Final = path
        self._at = 0

    def read(self) -> None:
        try:
            self._text.encode()
        except UnicodeEncodeError:
            self._refuse("half of a surrogate pair is no letter")
        self._alternatives(0)
        if self._at < len(self._text):
            self._refuse("')' closes no group")

    def _alternatives(self, depth: int) -> int:
        """Read up to a closing bracket or the end; give how often the most repeated part is repeated."""
        if depth > _MOST_DEPTH:
            self._refuse(f"more than {_MOST_DEPTH} groups within each other")
        most = 1
        branches, filled = 0, False
        while self._at < len(self._text) and self._text[self._at] != ")":
            letter = self._text[self._at]
            if letter == "|":
                if not filled:
                    self._refuse("an alternative is empty; write (...)? for what may be left out")
                branches, filled = branches + 1, False
                self._at += 1
                continue
            if letter in "^$":
                self._anchor(letter)
                continue
            most = max(most, self._repeated(depth))
            filled = True
        if branches and not filled:
            self._refuse("an alternative is empty; write (...)? for what may be left out")
        return most

    def _anchor(self, letter: str) -> None:
        begin = self._at == 0 or self._text[self._at - 1] in "(|^" or self._text.endswith("(?:", 0, self._at)
        following = self._text[self._at + 1 : self._at + 2]
        if (letter == "^" and not begin) or (letter == "$" and following not in {"", ")", "|", "$"}):
            self._refuse(f"{letter!r} can only stand at an end: the whole answer has to match")
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
            self._refuse("two repetitions behind each other; put the first into a group")
        return inner

    def _count(self, inner: int) -> int:
        found = _COUNT.match(self._text, self._at)
        if found is None:
            self._refuse("expected {3}, {3,} or {3,5}; a bracket itself is \\{")
        least = int(found[1])
        most = int(found[3]) if found[3] else least
        if most < least:
            self._refuse(f"{found[0]} has its bounds the wrong way round")
        self._at = found.end()
        return limit_repetition(self._path, most, inner)

    def _atom(self, depth: int) -> int:
        letter = self._text[self._at]
        self._at += 1
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            self._class()
        elif letter == "\\":
            self._escape(within=False)
        elif letter in "*+?":
            self._at -= 1
            self._refuse(f"there is nothing that {letter!r} repeats")
        elif letter == "{":
            self._at -= 1
            self._refuse("there is nothing that '{' repeats; a bracket itself is \\{")
        return 1

    def _group(self, depth: int) -> int:
        if self._text.startswith("?", self._at):
            self._kind_of_group()
        inner = self._alternatives(depth + 1)
        if self._at >= len(self._text):
            self._refuse("a group is not closed")
        self._at += 1
        return inner

    def _kind_of_group(self) -> None:
        self._at += 1
        if self._text.startswith(":", self._at):
            self._at += 1
            return
        for sign, kind in _GROUPS.items():
            if self._text.startswith(sign, self._at):
                self._refuse(f"{kind} cannot be imposed")
        name = _NAME.match(self._text, self._at)
        if name is None:
            self._refuse("expected (...), (?:...) or (?<name>...) with letters; flags cannot be imposed")
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
                    self._refuse("a class has to have letters; a bracket itself is \\]")
                return
            if letter in "\r\n":
                self._refuse("write the end of a line as \\n in a class")
            if letter == "-" and not first and last is not None and not self._text.startswith("]", self._at):
                ranged, first = True, False
                continue
            code = self._escape(within=True) if letter == "\\" else letter
            if ranged and (last is None or code is None or code < last):
                self._refuse("a range of letters has no order")
            last = None if ranged else code
            ranged, first = False, False
        self._refuse("a class is not closed")

    def _escape(self, *, within: bool) -> str | None:
        """Read what stands behind a backslash; give the letter, None for a set of them."""
        letter = self._text[self._at : self._at + 1]
        if not letter:
            self._refuse("there is nothing behind the last \\")
        if letter in _SETS:
            self._at += 1
            return None
        if found := _HEX.match(self._text, self._at):
            self._at = found.end()
            return self._coded(found[0])
        self._at += 1
        if letter in "uxcU":
            self._refuse(f"\\{letter} needs its digits")
        if letter.isdecimal() and letter != "0":
            self._refuse("references back cannot be imposed")
        if letter.isalnum() and letter not in _PLAIN:
            self._refuse(f"\\{letter} cannot be imposed")
        if not within and letter in "bB":
            self._refuse("borders of words cannot be imposed")
        return _SIMPLE.get(letter, letter)

    def _coded(self, written: str) -> str:
        if written[0] == "c":
            return chr(ord(written[1]) % 32)
        value = int(written[1:].strip("{}"), 16)
        if value > _LAST_LETTER or value in range(0xD800, 0xE000):
            self._refuse(f"\\{written} is no letter")
        return chr(value)

    def _refuse(self, message: str) -> NoReturn:
        raise GrammarRefused(self._path, f"{message} (letter {self._at + 1} of the pattern)")
