"""Base of the output parsers: a cursor over incremental text, an output collector, and the common grammar.

Parsers are generators that yield when they need more text.  All formats have reasoning first, then content in which
markers begin tool calls.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from ovmstrio.core.generation import ToolCallDelta

# ----------------------------------------------------------------------
# Cursor
# ----------------------------------------------------------------------

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""A parsing generator; yields when it needs more text."""

OnText: TypeAlias = Callable[[str], None]
"""Takes the next part of the parsed text."""

WHITESPACE: Final = " \t\r\n"


class MalformedText(Exception):
    """The text since the last :meth:`Cursor.hold` is not in the expected format."""


class Markers:
    """Set of marker texts, none a prefix of another."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.all: Final = tuple(markers)
        self._pattern: Final = re.compile("|".join(map(re.escape, self.all))) if self.all else re.compile(r"(?!)")
        self.firsts: Final = frozenset(marker[0] for marker in self.all)
        self._firsts: Final = re.compile(f"[{re.escape(''.join(sorted(self.firsts)))}]") if self.all else None
        self.longest: Final = max(map(len, self.all), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first complete marker."""
        return self._pattern.search(text, start)

    def is_next(self, text: str, start: int) -> bool:
        """Return whether a complete marker begins at ``start``."""
        return self._pattern.match(text, start) is not None

    def begun(self, text: str, start: int) -> int:
        """Return the position of an incomplete marker at the end of the text, or the text's length."""
        if self._firsts is None:
            return len(text)
        at = max(start, len(text) - self.longest + 1)
        while (match := self._firsts.search(text, at)) is not None:
            at = match.start()
            if any(marker.startswith(text[at:]) for marker in self.all):
                return at
            at += 1
        return len(text)


class BoundedText:
    """Bounded text buffer."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self._parts: Final[list[str]] = []
        self._room = limit

    def __call__(self, text: str) -> None:
        """Append text.

        Raises:
            MalformedText: the bound is exceeded.
        """
        self._room -= len(text)
        if self._room < 0:
            raise MalformedText
        self._parts.append(text)

    @property
    def text(self) -> str:
        """The buffered text."""
        return "".join(self._parts)


class Cursor:
    """Cursor over text that arrives in parts, with backtracking to one held position."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._is_ended = False

    def add(self, text: str) -> None:
        """Append text."""
        if self._held is None:
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self) -> None:
        """Mark the end of the text."""
        self._is_ended = True

    def hold(self) -> None:
        """Hold the current position, for :meth:`rewind`."""
        self._held = self._at

    def release(self) -> None:
        """Drop the held position."""
        self._held = None

    def rewind(self) -> int:
        """Return to the held position; return the number of characters."""
        held = self._at if self._held is None else self._held
        read, self._at, self._held = self._at - held, held, None
        return read

    def peek(self, count: int = 1) -> Steps[str]:
        """Return the next characters without consuming them; fewer at the end."""
        while len(self._text) - self._at < count and not self._is_ended:
            yield
        return self._text[self._at : self._at + count]

    def run(self, stops: re.Pattern[str], most: int) -> Steps[str]:
        """Return the text before the next match of ``stops``, about ``most`` characters at most, without consuming."""
        place = 0
        while True:
            if found := stops.search(self._text, self._at + place):
                return self._text[self._at : found.start()]
            place = len(self._text) - self._at
            if self._is_ended or place > most:
                return self._text[self._at :]
            yield

    def take(self, count: int = 1) -> Steps[str]:
        """Consume the next characters."""
        letters = yield from self.peek(count)
        self._at += len(letters)
        return letters

    def accept(self, literal: str) -> Steps[bool]:
        """Consume a literal if it is next; return whether it was."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            if have == literal:
                self._at += len(literal)
                return True
            if self._is_ended or not literal.startswith(have):
                return False
            yield

    def at(self, markers: Markers) -> Steps[bool]:
        """Return whether a marker is next, without consuming it."""
        while not markers.is_next(self._text, self._at):
            have = self._text[self._at : self._at + markers.longest]
            if self._is_ended or not any(marker.startswith(have) for marker in markers.all):
                return False
            yield
        return True

    def ahead(self, start: int = 0) -> Steps[int]:
        """Return the offset of the next non-whitespace character, without consuming; at most ``start`` + 256."""
        offset = start
        while (letter := (yield from self.peek(offset + 1))[offset:]) and letter in WHITESPACE and offset < start + 256:
            offset += 1
        return offset

    def expect(self, literal: str) -> Steps[None]:
        """Consume a literal.

        Raises:
            MalformedText: it is not next.
        """
        if not (yield from self.accept(literal)):
            raise MalformedText

    def blanks(self) -> Steps[None]:
        """Consume whitespace."""
        while (letter := (yield from self.peek())) and letter in WHITESPACE:
            self._at += 1

    def until(self, markers: Markers, give: OnText, *, consume: bool = True) -> Steps[str]:
        """Pass text to ``give`` as it arrives, up to the first marker, and consume the marker.

        Returns:
            The marker; empty at the end of the text.
        """
        while True:
            found = markers.find(self._text, self._at)
            begun = len(self._text) if self._is_ended else markers.begun(self._text, self._at)
            if found is not None and found.start() <= begun:
                self._consume_to(found.start(), give)
                if consume:
                    self._at = found.end()
                return found.group()
            self._consume_to(begun, give)
            if self._is_ended:
                return ""
            yield

    def short(self, ends: Markers, limit: int = 256) -> Steps[tuple[str, str]]:
        """Consume a short text and the marker after it; return both.

        Raises:
            MalformedText: the text is too long or has no marker.
        """
        while True:
            found = ends.find(self._text, self._at)
            begun = ends.begun(self._text, self._at)
            if found is not None and found.start() <= min(begun, self._at + limit):
                text, self._at = self._text[self._at : found.start()], found.end()
                return text, found.group()
            if self._is_ended or begun > self._at + limit:
                raise MalformedText
            yield

    def _consume_to(self, end: int, give: OnText) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            give(text)


# ----------------------------------------------------------------------
# Output
# ----------------------------------------------------------------------

_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9  # Mistral's templates require this length
_BLANKS: Final = " \t\r\n"
_MAX_HELD_BLANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Delta:
    """Parsed meaning of a piece of text; exactly one field is set."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class DeltaCollector:
    """Collects parser output; holds whitespace back until the following text shows where it belongs."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._blanks = ""
        self._leading = False
        self._is_reasoning = False
        self.calls = 0

    def text(self, text: str) -> None:
        """Add content."""
        self._is_reasoning = False
        self._add(text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._is_reasoning = True
        self._add(text)

    def part(self) -> None:
        """Begin another part, dropping the whitespace around the boundary."""
        self._blanks, self._leading = "", True

    def begin_call(self, name: str, identifier: str = "") -> None:
        """Begin a tool call; without an identifier of the model it gets a random one."""
        self.part()
        identifier = identifier or "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        self._deltas.append(Delta(calls=(ToolCallDelta(self.calls, id=identifier, name=name),)))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Append arguments to the current tool call."""
        if text:
            self._deltas.append(Delta(calls=(ToolCallDelta(self.calls - 1, arguments=text),)))

    def end(self) -> None:
        """Emit trailing whitespace of content."""
        if self._blanks and not self._is_reasoning:
            self._emit(self._blanks)
        self._blanks = ""

    def take(self) -> list[Delta]:
        """Return new deltas; adjacent ones of the same type are merged."""
        found, self._deltas = self._deltas, []
        joined: list[Delta] = []
        for delta in found:
            if joined and (merged := _merged(joined[-1], delta)) is not None:
                joined[-1] = merged
            else:
                joined.append(delta)
        return joined

    def _add(self, text: str) -> None:
        pending = self._blanks + text
        if self._leading:
            pending = pending.lstrip(_BLANKS)
            self._leading = not pending
        kept = max(len(pending.rstrip(_BLANKS)), len(pending) - _MAX_HELD_BLANKS)
        if kept:
            self._emit(pending[:kept])
        self._blanks = pending[kept:]

    def _emit(self, text: str) -> None:
        self._deltas.append(Delta(reasoning=text) if self._is_reasoning else Delta(text=text))


def _merged(first: Delta, second: Delta) -> Delta | None:
    """Merge two deltas; None if they differ in type, or the second begins a call."""
    if first.text and second.text:
        return Delta(text=first.text + second.text)
    if first.reasoning and second.reasoning:
        return Delta(reasoning=first.reasoning + second.reasoning)
    if first.calls and second.calls and not second.calls[0].name:
        before = first.calls[-1]
        grown = ToolCallDelta(before.index, before.id, before.name, before.arguments + second.calls[0].arguments)
        return Delta(calls=(*first.calls[:-1], grown))
    return None


# ----------------------------------------------------------------------
# Parser base
# ----------------------------------------------------------------------

_MAX_REREAD: Final = 1 << 20
"""Maximum characters that failed calls may re-read; after that, no more calls are parsed."""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of reasoning at the start of a text.

    Attributes:
        opened: whether the prompt ends with the start marker.
        special: the markers are special tokens.
        others: further begin markers with their end markers.
        answer: markers around an answer after reasoning; None if there are none.
    """

    begin: str
    end: str
    opened: bool = False
    special: bool = False
    others: tuple[tuple[str, str], ...] = ()
    answer: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ParserInputs:
    """Inputs of a parser; ``schemas`` are parameter schemas by function name."""

    thinking: ReasoningMarkers | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Reader: TypeAlias = Callable[[], Steps[None]]


class StreamingParser:
    """Streaming parser; the base passes text through, and formats add call markers and call parsing.

    The result does not depend on how the text is split.  Calls are parsed with a held position: a failed call's marker
    becomes content, and parsing continues after the marker.  Once a function name has been emitted, the rest of the
    call is emitted as arguments, valid or not.
    """

    special: ClassVar[bool] = False
    """True if markers of this format are special tokens."""
    begins: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a call."""
    closes: ClassVar[tuple[str, ...]] = ()
    """Markers that end a call; content unless there was a call."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Markers without meaning."""

    def __init__(self, reading: ParserInputs) -> None:
        self._thinking: Final = reading.thinking
        self._markers = Markers(dict.fromkeys((*self.begins, *self.closes, *self.dropped)))
        self.ends: Final = Markers(marker for marker in self._markers.all if len(marker) > 1 and marker[0] in "<[")
        self._reread = 0
        self.marker = ""
        self.schemas: Final = reading.schemas
        self.tape: Final = Cursor()
        self.out: Final = DeltaCollector()
        self._steps: Final = self._run()

    @property
    def keeps_special_tokens(self) -> bool:
        """True if the text must be decoded with special tokens."""
        return self.special or (self._thinking is not None and self._thinking.special)

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that are certain after the next part; never raises."""
        self.tape.add(text)
        next(self._steps, None)
        return self.out.take()

    def finish(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text."""
        self.tape.end()
        next(self._steps, None)
        self.out.end()
        return self.out.take()

    # Overridden by formats
    def bare(self) -> Steps[None]:
        """Parse calls at the start of the text that have no marker.

        Raises:
            MalformedText: there are none.
        """
        yield from ()
        raise MalformedText

    def call(self) -> Steps[None]:
        """Parse the calls after ``marker``.

        Raises:
            MalformedText: the text since the last ``hold`` is not a call.
        """
        yield from ()
        raise MalformedText

    # Used by formats
    def begin_call(self, name: str, identifier: str = "") -> None:
        """Emit the start of a call; no backtracking afterwards."""
        self.tape.release()
        self.out.begin_call(name, identifier)

    def function_name(self, written: str) -> str:
        """Return the function of the request that ``written`` names with a namespace; ``written`` if there is none."""
        name = re.split(r"[.:/]", written)[-1]
        return name if written not in self.schemas and name in self.schemas else written

    def end_call(self) -> None:
        """Mark a call as complete."""
        self.tape.hold()

    def attempt(self, reader: Reader, marker: str = "") -> Steps[bool]:
        """Parse a call, or treat the marker as content; return whether there was a call."""
        calls = self.out.calls
        self.tape.hold()
        try:
            yield from reader()
        except MalformedText:
            self._reread += self.tape.rewind()
            if self._reread > _MAX_REREAD:
                self._markers = Markers(())
            if self.out.calls == calls:
                self.out.text(marker)
        else:
            self.tape.release()
        return self.out.calls > calls

    def content(self) -> Steps[None]:
        """Parse content with its calls up to the end."""
        while marker := (yield from self.tape.until(self._markers, self.out.text)):
            if marker in self.begins:
                self.marker = marker
                yield from self.attempt(self.call, "" if marker in self.dropped else marker)
            elif marker in self.closes and not self.out.calls:
                self.out.text(marker)
            else:
                self.out.part()

    def body(self) -> Steps[None]:
        """Parse everything after the reasoning."""
        yield from self.attempt(self.bare)
        yield from self.content()

    def _run(self) -> Steps[None]:
        if self._thinking is not None:
            yield from self._read_reasoning(self._thinking)
        yield from self.body()

    def _read_reasoning(self, thinking: ReasoningMarkers) -> Steps[None]:
        self.tape.hold()
        yield from self.tape.blanks()
        last = thinking.end
        for begin, following in ((thinking.begin, thinking.end), *thinking.others):
            if (yield from self.tape.accept(begin)):
                last = following
                break
        else:
            if not thinking.opened:
                self.tape.rewind()
                return
        self.tape.release()
        self.out.part()
        end, has_end = Markers((last,)), None
        markers = Markers((last, *(marker for marker in self.begins if marker in self.ends.all)))
        while (marker := (yield from self.tape.until(markers, self.out.reasoning))) not in {last, ""}:
            if has_end is None:
                self.tape.hold()
                has_end = bool((yield from self.tape.until(end, lambda _: None)))
                self.tape.rewind()
            # With a later end marker the call is part of the reasoning; without one the model omitted the marker.
            self.marker = marker
            if not has_end and (yield from self.attempt(self.call)):
                break
            self.out.reasoning(marker)
            if has_end or not self._markers.all:
                markers = end
        self.out.part()
        if thinking.answer is not None:
            yield from self.tape.blanks()
            if (yield from self.tape.accept(thinking.answer[0])):
                self._markers = Markers((*self._markers.all, thinking.answer[1]))
