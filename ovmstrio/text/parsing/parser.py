"""The frame of all formats: reasoning first, then content in which markers begin calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from ovmstrio.core.generation import CallDelta

__all__ = [
    "Brackets",
    "Delta",
    "FormatReading",
    "Give",
    "Kept",
    "Machine",
    "Malformed",
    "Markers",
    "OutputParser",
    "ParsedOutput",
    "Steps",
    "Tape",
    "Thinking",
]

# ----------------------------------------------------------------------
# A text that comes in parts, read by generators: each yields where it needs more, and goes on when that is there
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# What parsers of a model's text give: content, reasoning and parts of calls, in the order of the text
# ----------------------------------------------------------------------

_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9  # templates of Mistral's refuse identifiers of any other length
_BLANKS: Final = " \t\r\n"
_MOST_BLANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of a model's text means; one of the three is there."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class OutputParser(Protocol):
    """Takes a text of a model apart while it comes; what comes out does not depend on how it is cut into pieces."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must be decoded with its special tokens, which this format is marked by."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Give what is certain with this next part; never raises."""
        ...

    def finish(self) -> list[Delta]:
        """Give what was held back, for the text has ended."""
        ...


class ParsedOutput:
    """Collects what a parser finds; blanks are held until what follows says whether they belong to a text."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._blanks = ""
        self._leading = False
        self._thinks = False
        self.calls = 0

    def text(self, text: str) -> None:
        """Add content."""
        self._thinks = False
        self._add(text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._thinks = True
        self._add(text)

    def part(self) -> None:
        """Begin with something else: blanks before it and after it are nobody's."""
        self._blanks, self._leading = "", True

    def begin_call(self, name: str) -> None:
        """Add a call of the function ``name``."""
        self.part()
        identifier = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        self._deltas.append(Delta(calls=(CallDelta(self.calls, id=identifier, name=name),)))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if text:
            self._deltas.append(Delta(calls=(CallDelta(self.calls - 1, arguments=text),)))

    def end(self) -> None:
        """Give blanks at the end of a text that is content."""
        if self._blanks and not self._thinks:
            self._show(self._blanks)
        self._blanks = ""

    def take(self) -> list[Delta]:
        """Give what has come since the last time, neighbours of a kind joined."""
        found, self._deltas = self._deltas, []
        joined: list[Delta] = []
        for delta in found:
            if joined and (merged := _merged(joined[-1], delta)) is not None:
                joined[-1] = merged
            else:
                joined.append(delta)
        return joined

    def _add(self, text: str) -> None:
        whole = self._blanks + text
        if self._leading:
            whole = whole.lstrip(_BLANKS)
            self._leading = not whole
        kept = max(len(whole.rstrip(_BLANKS)), len(whole) - _MOST_BLANKS)
        if kept:
            self._show(whole[:kept])
        self._blanks = whole[kept:]

    def _show(self, text: str) -> None:
        self._deltas.append(Delta(reasoning=text) if self._thinks else Delta(text=text))


def _merged(first: Delta, second: Delta) -> Delta | None:
    """Give both as one; None where they are of different kinds, or the second begins a call."""
    if first.text and second.text:
        return Delta(text=first.text + second.text)
    if first.reasoning and second.reasoning:
        return Delta(reasoning=first.reasoning + second.reasoning)
    if first.calls and second.calls and not second.calls[0].name:
        before = first.calls[-1]
        grown = CallDelta(before.index, before.id, before.name, before.arguments + second.calls[0].arguments)
        return Delta(calls=(*first.calls[:-1], grown))
    return None


# ----------------------------------------------------------------------
# The frame of all formats: reasoning first, then content in which markers begin calls
# ----------------------------------------------------------------------

_MOST_WASTED: Final = 1 << 20
"""Letters that may be read again because a call was none; beyond them no more calls are looked for."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How reasoning at the beginning of a text is marked.

    Attributes:
        opened: it begins with the text, because the prompt ended with the marker.
        special: the markers are special tokens.
    """

    begin: str
    end: str
    opened: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class FormatReading:
    """What a parser needs to know of its request.

    Attributes:
        schemas: of the parameters, by the names of the functions.
    """

    thinking: Thinking | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Reader: TypeAlias = Callable[[], Steps[None]]


class Machine:
    """Passes a text through; formats add what begins a call and how one is read.

    A call is read with the tape held, so that nothing is lost where it turns out to be none: its marker is content, and
    reading goes on behind that.  From when its name has been given, what belongs to it are arguments, right or wrong as
    the model wrote them.
    """

    special: ClassVar[bool] = False
    """Whether special tokens mark this format."""
    begins: ClassVar[tuple[str, ...]] = ()
    """What begins a call."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Marks that mean nothing."""

    def __init__(self, reading: FormatReading) -> None:
        self._thinking: Final = reading.thinking
        self._markers = Markers((*self.begins, *self.dropped))
        self._wasted = 0
        self.marker = ""
        self.schemas: Final = reading.schemas
        self.tape: Final = Tape()
        self.out: Final = ParsedOutput()
        self._steps: Final = self._run()

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must be decoded with its special tokens, which this format is marked by."""
        return self.special or (self._thinking is not None and self._thinking.special)

    def feed(self, text: str) -> list[Delta]:
        """Give what is certain with this next part; never raises."""
        self.tape.add(text)
        next(self._steps, None)
        return self.out.take()

    def finish(self) -> list[Delta]:
        """Give what was held back, for the text has ended."""
        self.tape.end()
        next(self._steps, None)
        self.out.end()
        return self.out.take()

    # What a format says

    def bare(self) -> Steps[None]:
        """Read calls that begin the text without a marker.

        Raises:
            Malformed: there are none.
        """
        yield from ()
        raise Malformed

    def call(self) -> Steps[None]:
        """Read the calls that ``marker`` has begun.

        Raises:
            Malformed: what was read since the last ``hold`` is no call.
        """
        yield from ()
        raise Malformed

    # What formats use

    def begin_call(self, name: str) -> None:
        """Tell of a call; there is no way back from here."""
        self.tape.release()
        self.out.begin_call(name)

    def end_call(self) -> None:
        """Say that a call is whole; what follows may be none."""
        self.tape.hold()

    def attempt(self, reader: Reader, marker: str = "") -> Steps[bool]:
        """Read a call, or what looked like one as content.

        Returns:
            Whether there was one.
        """
        calls = self.out.calls
        self.tape.hold()
        try:
            yield from reader()
        except Malformed:
            self._wasted += self.tape.rewind()
            if self._wasted > _MOST_WASTED:
                self._markers = Markers(())
            if self.out.calls == calls:
                self.out.text(marker)
        else:
            self.tape.release()
        return self.out.calls > calls

    def content(self) -> Steps[None]:
        """Read content with its calls, up to the end of the text."""
        while marker := (yield from self.tape.until(self._markers, self.out.text)):
            if marker in self.dropped:
                self.out.part()
            else:
                self.marker = marker
                yield from self.attempt(self.call, marker)

    def body(self) -> Steps[None]:
        """Read what comes after reasoning."""
        yield from self.attempt(self.bare)
        yield from self.content()

    def _run(self) -> Steps[None]:
        if self._thinking is not None:
            yield from self._reason(self._thinking)
        yield from self.body()

    def _reason(self, thinking: Thinking) -> Steps[None]:
        self.tape.hold()
        yield from self.tape.blanks()
        if not (yield from self.tape.accept(thinking.begin)) and not thinking.opened:
            self.tape.rewind()
            return
        self.tape.release()
        self.out.part()
        yield from self.tape.until(Markers((thinking.end,)), self.out.reasoning)
        self.out.part()
