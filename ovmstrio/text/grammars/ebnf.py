"""Check of grammars in GBNF notation as xgrammar 0.1.31 reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NoReturn

from ovmstrio.text.grammars.errors import MAX_GRAMMAR_CHARACTERS, GrammarRefused, check_repetition

_ROOT: Final = "root"
_MAX_DEPTH: Final = 50
_MAX_RULES: Final = 2000
_ESCAPE: Final = r"\\(?:[nrt\"'\\0fv]|x[0-9A-Fa-f]{2}|u(?!d[89ab]|D[89AB])[0-9A-Fa-f]{4})"
_TOKENS: Final = re.compile(
    rf"""(?P<blank>[ \t]+|\#[^\n]*)|(?P<line>\r?\n)|(?P<assign>::=)
    |(?P<text>"(?:[^"\\\n\r]|{_ESCAPE})*")
    |(?P<set>\[\^?(?:(?:[^\]\\\n\r-]|{_ESCAPE}|\\[\]\-\[^])(?:-(?:[^\]\\\n\r-]|{_ESCAPE}|\\[\]\-\[^]))?|-)+\])
    |(?P<count>\{{[ ]*\d{{1,7}}[ ]*(?:,[ ]*(?:\d{{1,7}})?[ ]*)?\}})
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<sign>[()|*+?])""",
    re.VERBOSE,
)
_RANGE: Final = re.compile(rf"([^\\]|{_ESCAPE}|\\[\]\-\[^])-([^\\]|{_ESCAPE}|\\[\]\-\[^])")
_ELEMENTS: Final = frozenset({"text", "set", "name", "start"})
_SIMPLE_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def check_ebnf(grammar: str) -> None:
    """Check a grammar.

    Raises:
        GrammarRefused: it is invalid or not supported; the path is the line.
    """
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(
            "", f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )
    try:
        grammar.encode()
    except UnicodeEncodeError:
        raise GrammarRefused("", "lone surrogates are not supported") from None
    _GrammarChecker(_tokens(grammar)).check()


class _Token:
    """A token and its line."""

    def __init__(self, kind: str, text: str, line: int) -> None:
        self.kind: Final = kind
        self.text: Final = text
        self.line: Final = line

    def refuse(self, message: str) -> NoReturn:
        raise GrammarRefused(f"line {self.line}", message)


def _tokens(grammar: str) -> list[_Token]:
    found: list[_Token] = []
    at, line, fresh = 0, 1, True
    while at < len(grammar):
        match = _TOKENS.match(grammar, at)
        if match is None:
            rest = grammar[at : at + 12].split("\n", maxsplit=1)[0]
            _Token("", "", line).refuse(f'expected "strings", [classes], names, groups or repetitions, got {rest!r}')
        kind, at = str(match.lastgroup), match.end()
        if kind == "line":
            line, fresh = line + 1, True
        elif kind != "blank":
            found.append(_Token("start" if fresh and kind == "name" else kind, match[0], line))
            fresh = False
    found.append(_Token("end", "", line))
    return found


class _GrammarChecker:
    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens: Final = tokens
        self._at = 0
        self._rules: Final[dict[str, list[list[str]]]] = {}
        self._used: Final[list[_Token]] = []

    def check(self) -> None:
        while self._next.kind != "end":
            self._rule()
        if _ROOT not in self._rules:
            self._next.refuse("rule 'root' is missing: root ::= ...")
        for token in self._used:
            if token.text not in self._rules:
                token.refuse(f"unknown rule {token.text!r}")
        self._check_ends()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _is_rule_start(self) -> bool:
        return self._next.kind == "start" and self._tokens[self._at + 1].kind == "assign"

    def _rule(self) -> None:
        name = self._take()
        if name.kind != "start" or self._take().kind != "assign":
            name.refuse("expected a rule on a separate line: name ::= ...")
        if name.text in self._rules:
            name.refuse(f"rule {name.text!r} is defined twice; combine alternatives with |")
        if len(self._rules) >= _MAX_RULES:
            name.refuse(f"more than {_MAX_RULES} rules")
        self._rules[name.text] = []
        self._rules[name.text] = self._alternatives(0)[0]

    def _alternatives(self, depth: int) -> tuple[list[list[str]], int]:
        """Parse alternatives; return the rules that each needs, and the largest repetition count."""
        if depth > _MAX_DEPTH:
            self._next.refuse(f"groups nested more than {_MAX_DEPTH} deep")
        needs, most = [], 1
        while True:
            needed, repeated = self._sequence(depth)
            needs.append(needed)
            most = max(most, repeated)
            if self._next.text != "|" or self._next.kind != "sign":
                return needs, most
            self._take()

    def _sequence(self, depth: int) -> tuple[list[str], int]:
        needed: list[str] = []
        most, parts = 1, 0
        while not self._is_rule_start() and (
            self._next.kind in {"text", "set", "name", "start"} or self._next.text == "("
        ):
            names, repeated = self._element(depth)
            needed += names
            most, parts = max(most, repeated), parts + 1
        if not parts:
            self._next.refuse('an alternative is empty; write "" for an empty one')
        return needed, most

    def _element(self, depth: int) -> tuple[list[str], int]:
        token = self._take()
        needed: list[str] = []
        inner = 1
        if token.kind in {"name", "start"}:
            if self._next.text == "(" and token.text[0].isupper():
                token.refuse(f"{token.text}(...) is not supported")
            self._used.append(token)
            needed = [token.text]
        elif token.kind == "set":
            _check_set(token)
        elif token.kind == "sign":
            choices, inner = self._group(token, depth)
            # A rule is needed if all alternatives need it; an approximation that is sufficient here.
            needed = list(set(choices[0]).intersection(*choices[1:]))
        return self._repetition(needed, inner)

    def _group(self, token: _Token, depth: int) -> tuple[list[list[str]], int]:
        if self._next.text == ")":
            self._take()
            return [[]], 1
        choices, inner = self._alternatives(depth + 1)
        if self._next.text != ")":
            token.refuse("a group is not closed")
        self._take()
        return choices, inner

    def _repetition(self, needed: list[str], inner: int) -> tuple[list[str], int]:
        token = self._next
        if token.kind == "sign" and token.text in "*+?":
            self._take()
            needed = needed if token.text == "+" else []
        elif token.kind == "count":
            self._take()
            numbers = re.findall(r"\d+", token.text)
            least, most = int(numbers[0]), int(numbers[-1])
            if most < least:
                token.refuse(f"{token.text} has its bounds in the wrong order")
            inner = check_repetition(f"line {token.line}", most, inner)
            needed = needed if least else []
        else:
            return needed, inner
        if self._next.kind == "count" or (self._next.kind == "sign" and self._next.text in "*+?"):
            self._next.refuse("two consecutive repetitions; put the first into a group")
        return needed, inner

    def _check_ends(self) -> None:
        finite = self._finite()
        for name in self._rules:
            if name not in finite:
                raise GrammarRefused("", f"rule {name!r}: infinite recursion")

    def _finite(self) -> set[str]:
        """Return the rules with a finite text: those with an alternative whose rules all have one."""
        waiting: dict[str, list[tuple[str, set[str]]]] = {}
        for name, choices in self._rules.items():
            for needed in map(set, choices):
                for part in needed:
                    waiting.setdefault(part, []).append((name, needed))
        ready = [name for name, choices in self._rules.items() if not all(choices)]
        finite = set(ready)
        while ready:
            part = ready.pop()
            for name, needed in waiting.pop(part, ()):
                needed.discard(part)
                if not needed and name not in finite:
                    finite.add(name)
                    ready.append(name)
        return finite


def _check_set(token: _Token) -> None:
    inside = token.text[1:-1].removeprefix("^")
    for found in _RANGE.finditer(inside):
        if _code(found[1]) > _code(found[2]):
            token.refuse(f"the range {found[0]} is reversed")


def _code(written: str) -> str:
    if len(written) == 1:
        return written
    if written[1] in "xu":
        return chr(int(f"0x{written[2:]}", 0))
    return _SIMPLE_ESCAPES.get(written[1], written[1])
