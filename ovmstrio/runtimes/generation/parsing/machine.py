"""The frame of all formats: reasoning first, then content in which markers begin calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from ovmstrio.runtimes.generation.parsing.deltas import Delta, ParsedOutput
from ovmstrio.runtimes.generation.parsing.tape import Malformed, Markers, Steps, Tape

__all__ = ["FormatReading", "Machine", "Thinking"]

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
