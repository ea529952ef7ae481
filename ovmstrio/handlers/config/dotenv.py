r"""Parser for ``.env`` files: shell assignments, without a shell.

::

    # a comment
    export NAME=value          # another
    GREETING="hello $NAME"     # expanded; also ${NAME} and ${NAME:-default}
    LITERAL='as it is: $NAME'
    SPACED=a\ b

Other shell syntax (``$(commands)``, ``if``) is reported as a problem.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ovmstrio.config.documents import to_short_json
from ovmstrio.core.errors import Problem

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_START: Final = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=")
_BLANK: Final = re.compile(r"(?:[ \t\r\n;]|\\\n|#[^\n]*)*")
_PLAIN: Final = re.compile(r"[^\s'\"\\$`;#&|<>()]+")
_IN_QUOTES: Final = re.compile(r"[^\"\\$`]+")
_BRACED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?-)([^${}`\"'\\]*))?\}")
_HOME: Final = re.compile(r"~(?=[/\s;]|$)")
_EXPORT_ONLY: Final = re.compile(r"export(?:[ \t]+[A-Za-z_][A-Za-z0-9_]*)+[ \t]*(?=[\n;#]|$)")


class _ParseError(ValueError):
    pass


def parse_dotenv(text: str, environment: Mapping[str, str], file: str) -> tuple[dict[str, str], list[Problem]]:
    """Parse assignments; return the variables, and one problem for each unreadable line.

    ``$NAME`` refers to earlier assignments and ``environment``. ``file`` is the name of the file in problems.
    """
    reader = _DotenvReader(text.replace("\r\n", "\n").replace("\0", ""), dict(environment))
    problems: list[Problem] = []
    while not reader.at_end():
        line = reader.line()
        try:
            reader.assignment()
        except _ParseError as error:
            found, expected = to_short_json(reader.rest_of(line)), "NAME=value"
            problems.append(Problem(str(error), file, line, expected=expected, found=found))
            reader.skip_line()
    return reader.variables, problems


@dataclass(slots=True)
class _DotenvReader:
    _text: str
    _known: dict[str, str]
    variables: dict[str, str]
    _position: int = 0

    def __init__(self, text: str, known: dict[str, str]) -> None:
        self._text = text
        self._known = known
        self.variables = {}
        self._position = 0

    def at_end(self) -> bool:
        self._take(_BLANK)
        return self._position >= len(self._text)

    def line(self) -> int:
        return self._text.count("\n", 0, self._position) + 1

    def rest_of(self, line: int) -> str:
        return self._text.split("\n")[line - 1].strip()

    def skip_line(self) -> None:
        end = self._text.find("\n", self._position)
        self._position = len(self._text) if end < 0 else end

    def assignment(self) -> None:
        if self._take(_EXPORT_ONLY):
            return
        start = self._take(_START)
        if start is None:
            raise _ParseError("not an assignment")
        value = self._value()
        self.variables[start[1]] = self._known[start[1]] = value

    def _value(self) -> str:
        parts = [self._known.get("HOME", "~")] if self._take(_HOME) else []
        while (character := self._text[self._position : self._position + 1]) and character not in " \t\r\n;":
            if plain := self._take(_PLAIN):
                parts.append(plain[0])
                continue
            self._position += 1
            parts.append(self._special(character))
        return "".join(parts)

    def _special(self, character: str) -> str:
        if character == "'":
            return self._single_quoted()
        if character == '"':
            return self._double_quoted()
        if character == "\\":
            return self._escaped()
        if character == "$":
            return self._expanded()
        if character == "#":  # no comment within a word
            return character
        raise _ParseError(f"the shell syntax {character} is not supported: quote it")

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._position)
        if end < 0:
            raise _ParseError("unterminated quote '")
        text, self._position = self._text[self._position : end], end + 1
        return text

    def _double_quoted(self) -> str:
        parts: list[str] = []
        while True:
            if plain := self._take(_IN_QUOTES):
                parts.append(plain[0])
            character = self._text[self._position : self._position + 1]
            self._position += 1
            if character == '"':
                return "".join(parts)
            if not character:
                raise _ParseError('unterminated quote "')
            parts.append(self._double_quoted_special(character))

    def _double_quoted_special(self, character: str) -> str:
        if character == "$":
            return self._expanded()
        if character == "`":
            raise _ParseError("command substitution is not supported; write the result")
        following = self._escaped()
        return following if following in {'"', "\\", "$", "`", ""} else f"\\{following}"

    def _escaped(self) -> str:
        following = self._text[self._position : self._position + 1]
        self._position += 1
        return "" if following == "\n" else following

    def _expanded(self) -> str:
        if self._text.startswith("(", self._position):
            raise _ParseError("command substitution is not supported; write the result")
        if braced := self._take(_BRACED):
            name, operator, otherwise = braced.groups()
            value = self._known.get(name)
            return otherwise or "" if value is None or (operator == ":-" and not value) else value
        if named := self._take(_NAME):
            return self._known.get(named[0], "")
        if self._text.startswith(("{", "'", '"'), self._position):
            raise _ParseError("this expansion is not supported; write the result")
        return "$"

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return match
