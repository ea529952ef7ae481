"""A text that comes in parts, read by generators: each yields where it needs more, and goes on when that is there.

What is read depends on the letters alone, never on how they were cut into parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeAlias, TypeVar

__all__ = ["Brackets", "Give", "Kept", "Malformed", "Markers", "Steps", "Tape"]

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Reading that yields where the text that has come is not enough."""

Give: TypeAlias = Callable[[str], None]
"""Takes the next part of what is read."""

BLANKS: Final = " \t\r\n"


class Malformed(Exception):
    """What has been read since the last :meth:`Tape.hold` is not what it looked like."""


class Markers:
    """Texts to look for, none of which begins with another one."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.all: Final = tuple(markers)
        self._pattern: Final = re.compile("|".join(map(re.escape, self.all))) if self.all else re.compile(r"(?!)")
        self._firsts: Final = (
            re.compile("[" + "".join(sorted({re.escape(m[0]) for m in self.all})) + "]") if self.all else None
        )
        self._longest: Final = max(map(len, self.all), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Give the first one that is whole."""
        return self._pattern.search(text, start)

    def begun(self, text: str, start: int) -> int:
        """Give where the end of the text may be the first letters of one; its length where it is not."""
        if self._firsts is None:
            return len(text)
        at = max(start, len(text) - self._longest + 1)
        while (match := self._firsts.search(text, at)) is not None:
            at = match.start()
            if any(marker.startswith(text[at:]) for marker in self.all):
                return at
            at += 1
        return len(text)


class Kept:
    """Keeps what is read, up to a bound."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._parts: Final[list[str]] = []
        self._room = most

    def __call__(self, text: str) -> None:
        """Keep the next part.

        Raises:
            Malformed: it is more than may be kept.
        """
        self._room -= len(text)
        if self._room < 0:
            raise Malformed
        self._parts.append(text)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._parts)


class Brackets:
    """How brackets and quoted texts are written, to find where a value ends."""

    def __init__(self, opening: str, closing: str, quotes: tuple[str, ...], *, escapes: bool) -> None:
        self.opening: Final = frozenset(opening)
        self.closing: Final = frozenset(closing)
        self.outside: Final = Markers((*opening, *closing, *quotes))
        self.inside: Final = {quote: Markers((quote, "\\") if escapes else (quote,)) for quote in quotes}


class Tape:
    """The text, and how far it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._ended = False

    def add(self, text: str) -> None:
        """Put more at its end."""
        if self._held is None:
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self) -> None:
        """Say that no more comes."""
        self._ended = True

    def hold(self) -> None:
        """Remember this place; everything from here on can be read again."""
        self._held = self._at

    def release(self) -> None:
        """Forget the place, for what was read since is certain."""
        self._held = None

    def rewind(self) -> int:
        """Go back to the place that is held, and give how many letters that is."""
        held = self._at if self._held is None else self._held
        read, self._at, self._held = self._at - held, held, None
        return read

    def peek(self, count: int = 1) -> Steps[str]:
        """Give the next letters without reading them; fewer at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int = 1) -> Steps[str]:
        """Read the next letters."""
        letters = yield from self.peek(count)
        self._at += len(letters)
        return letters

    def accept(self, literal: str) -> Steps[bool]:
        """Read this text if it is what comes next."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            if have == literal:
                self._at += len(literal)
                return True
            if self._ended or not literal.startswith(have):
                return False
            yield

    def expect(self, literal: str) -> Steps[None]:
        """Read this text, which must be what comes next.

        Raises:
            Malformed: it is not.
        """
        if not (yield from self.accept(literal)):
            raise Malformed

    def blanks(self) -> Steps[None]:
        """Read blanks, if there are any."""
        while (letter := (yield from self.peek())) and letter in BLANKS:
            self._at += 1

    def until(self, markers: Markers, give: Give) -> Steps[str]:
        """Read up to the first of the markers and over it; give what is before it as it comes.

        Returns:
            The marker; nothing where the text ends without one.
        """
        while True:
            found = markers.find(self._text, self._at)
            begun = len(self._text) if self._ended else markers.begun(self._text, self._at)
            if found is not None and found.start() <= begun:
                self._give(found.start(), give)
                self._at = found.end()
                return found.group()
            self._give(begun, give)
            if self._ended:
                return ""
            yield

    def short(self, ends: Markers, most: int = 256) -> Steps[tuple[str, str]]:
        """Read a short text up to the first of the markers, and over it; give both.

        Raises:
            Malformed: it is longer, or the text ends before.
        """
        while True:
            found = ends.find(self._text, self._at)
            begun = ends.begun(self._text, self._at)
            if found is not None and found.start() <= min(begun, self._at + most):
                text, self._at = self._text[self._at : found.start()], found.end()
                return text, found.group()
            if self._ended or begun > self._at + most:
                raise Malformed
            yield

    def balanced(self, brackets: Brackets, give: Give, *, depth: int = 0) -> Steps[bool]:
        """Read a value in brackets, of which ``depth`` have been read, and give it as it comes.

        Returns:
            Whether its last bracket has come before the text's end.
        """
        while marker := (yield from self.until(brackets.outside, give)):
            give(marker)
            if marker in brackets.inside:
                if not (yield from self._quoted(brackets.inside[marker], give)):
                    return False
                continue
            depth += 1 if marker in brackets.opening else -1
            if depth <= 0:
                return True
        return False

    def _quoted(self, ends: Markers, give: Give) -> Steps[bool]:
        while marker := (yield from self.until(ends, give)):
            give(marker)
            if marker != "\\":
                return True
            give((yield from self.take()))
        return False

    def _give(self, end: int, give: Give) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            give(text)
