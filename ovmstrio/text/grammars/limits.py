"""The error for refused grammars, and the limits of regular expressions and EBNF grammars.

The engine judges their syntax.  Deep nesting would overflow its stack, and nested repetitions would exhaust its memory,
before it could refuse them.
"""

from __future__ import annotations

import re
from typing import Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.util.truncation import cut

MAX_GRAMMAR_CHARACTERS: Final = 256 * 1024
"""Maximum characters of a schema, pattern or grammar."""

_MAX_PATH_CHARACTERS: Final = 200


class GrammarRefused(InvalidField):
    """A requested grammar is invalid or not supported.

    Args:
        path: place in the grammar, such as ``$.properties.size``; empty for all of it.
        message: error and hint.
        field: field of the request.
    """

    def __init__(self, path: str, message: str, *, field: str = "response_format") -> None:
        where = f"{field}: at {cut(path, _MAX_PATH_CHARACTERS)}: " if path else f"{field}: "
        super().__init__(where + message, field=field, code="invalid_grammar")
        self.path = path
        self.reason = message

    def of(self, field: str, path: str = "") -> GrammarRefused:
        """Return the error for another field, or for a nested part at ``path``."""
        return GrammarRefused(path + self.path.removeprefix("$") if path else self.path, self.reason, field=field)


_MAX_DEPTH: Final = 100
_MAX_REPETITIONS: Final = 1_000_000
_MAX_NESTED_REPETITIONS: Final = 20_000
_CLASS_OR_SIGN: Final = r"\[(?:\\.|[^\]\\])*\]?|[()]|\{\s*(?P<least>\d*)\s*,?\s*(?P<most>\d*)\s*\}"
_PATTERN_TOKENS: Final = re.compile(rf"\\.|{_CLASS_OR_SIGN}", re.DOTALL)
_EBNF_TOKENS: Final = re.compile(rf'\#[^\r\n]*|"(?:\\.|[^"\\\r\n])*"?|{_CLASS_OR_SIGN}', re.DOTALL)


def check_pattern(pattern: str, path: str = "") -> None:
    """Check the limits of a regular expression.

    Raises:
        GrammarRefused: a limit is exceeded.
    """
    _check(pattern, path, "pattern", _PATTERN_TOKENS)


def check_ebnf(grammar: str, path: str = "") -> None:
    """Check the limits of an EBNF grammar.

    Raises:
        GrammarRefused: a limit is exceeded.
    """
    _check(grammar, path, "grammar", _EBNF_TOKENS)


def _check(text: str, path: str, subject: str, tokens: re.Pattern[str]) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(
            path, f"the {subject} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarRefused(path, "lone surrogates are not supported") from None
    # The largest repetition in each open group, and that of the element before the current token.
    largest, last, end = [1], 1, 0
    for token in tokens.finditer(text):
        if text[end : token.start()].strip():
            last = 1
        end = token.end()
        if token[0].startswith("#"):
            continue
        where = f"(position {token.start() + 1} of the {subject})"
        if token[0] == "(":
            largest.append(1)
            if len(largest) > _MAX_DEPTH + 1:
                raise GrammarRefused(path, f"groups nested more than {_MAX_DEPTH} deep {where}")
        elif token[0] == ")":
            last = largest.pop() if len(largest) > 1 else 1
        elif token["least"] is None:
            last = 1
            continue
        else:
            last = check_repetition(path, _count(token["most"] or token["least"]), last, where)
        largest[-1] = max(largest[-1], last)


def _count(digits: str) -> int:
    significant = digits.lstrip("0")[:20]  # Python refuses to parse thousands of digits
    return int(significant or "0")


def check_repetition(path: str, limit: int, within: int = 1, where: str = "") -> int:
    """Return the product of nested repetition counts.

    Raises:
        GrammarRefused: the product is too large to compile.
    """
    together = max(limit, 1) * within
    if limit > _MAX_REPETITIONS or (within > 1 and together > _MAX_NESTED_REPETITIONS):
        error = f"{together} repetitions are too many: at most {_MAX_REPETITIONS}, or {_MAX_NESTED_REPETITIONS} nested"
        raise GrammarRefused(path, f"{error} {where}".rstrip())
    return together
