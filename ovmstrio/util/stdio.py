"""Whose code runs, and what it prints: texts in pieces, from many threads and tasks at once, made into whole lines.

Needs nothing but the standard library, for interpreters of users run it as well.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Literal, TextIO

from ovmstrio.util.truncation import MOST_CHARACTERS, cut

# ----------------------------------------------------------------------
# Whose code runs, and what it prints: texts in pieces, from many threads and tasks at once, made into whole lines
# ----------------------------------------------------------------------

StreamName = Literal["stdout", "stderr"]

STREAM_NAMES: Final[tuple[StreamName, ...]] = ("stdout", "stderr")

code_names: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("whose code runs", default=None)
"""The names that lines of the log have for the user's code that runs here; None for the server's own."""

_MOST_LINES: Final = 1000
"""Of one text; what prints more at once has the rest counted."""

_DEBUGGERS: Final = frozenset({"bdb", "cmd", "pdb"})
"""Modules that print for whoever sits at the terminal."""

_NONE: Final[Mapping[LineStream, str]] = MappingProxyType({})

_unfinished: Final[ContextVar[Mapping[LineStream, str]]] = ContextVar("unfinished lines", default=_NONE)


@contextmanager
def running_code_of(names: Mapping[str, str] | None) -> Iterator[None]:
    """Be code of users with these names within the block, and in the threads and tasks that it starts."""
    token = code_names.set(names)
    try:
        yield
    finally:
        finish_lines()
        code_names.reset(token)


def finish_lines() -> None:
    """End the lines that the code that has ended here has begun."""
    if texts := _unfinished.get():
        _unfinished.set(_NONE)
        for stream, text in texts.items():
            stream.finish(text)


def whole_lines(begun: str, text: str) -> tuple[list[str], str]:
    """Give the lines that a text ends, cut, and what it begins, of which no more is kept than can be seen.

    What a carriage return has the next characters write over is left out, and so are empty lines.
    """
    *ended, rest = (begun + text).split("\n")
    lines = [cut(seen) for line in ended if (seen := _seen(line)).strip()]
    return lines, (_seen(rest) if len(rest) > MOST_CHARACTERS else rest)[: 2 * MOST_CHARACTERS]


def _seen(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


class LineStream:
    """Stands for a text stream, and hands whole lines to somebody else as long as that one takes them.

    Each thread and each task has a line of its own, which ends with its line break or with the call of the user's code
    (:func:`finish_lines`); ``flush`` ends none.  Everything else is the stream's.

    Args:
        original: the stream.
        take: gets a line, without its line break.
        is_taken: tells whether code that writes here and now has its lines taken.
    """

    def __init__(self, original: TextIO, take: Callable[[str], None], is_taken: Callable[[], bool]) -> None:
        self.original = original
        self._take = take
        self._is_taken = is_taken

    def write(self, text: str) -> int:
        """Write a text.

        Raises:
            TypeError: it is none.
        """
        writer = sys._getframe(1)  # noqa: SLF001 - the way to know who writes
        if not self._is_taken() or writer.f_globals.get("__name__") in _DEBUGGERS:
            return self.original.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begun = _unfinished.get()
        lines, rest = whole_lines(begun.get(self, ""), text)
        if rest or begun:
            # Never changed in its place: other contexts may have begun as copies of this one.
            others = {stream: one for stream, one in begun.items() if stream is not self}
            _unfinished.set({**others, self: rest} if rest else others)
        for line in lines[:_MOST_LINES]:
            self._take(line)
        if len(lines) > _MOST_LINES:
            self._take(f"... ({len(lines)} lines)")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, which bring their line breaks themselves."""
        for line in lines:
            self.write(line)

    def finish(self, text: str) -> None:
        """Hand over a line without its line break."""
        for line in whole_lines("", f"{text}\n")[0]:
            self._take(line)

    def flush(self) -> None:
        """Flush the stream; a line that has not ended is not written."""
        self.original.flush()

    def isatty(self) -> bool:
        """Whether a terminal gets what is written here and now."""
        return not self._is_taken() and self.original.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def original_stream(stream: Any) -> Any:
    """Give the stream that another one stands for, if it does."""
    return stream.original if isinstance(stream, LineStream) else stream


def print_whole_lines() -> None:
    """Have this process print whole lines from now on, each with one write."""
    for name in STREAM_NAMES:
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, LineStream(stream, _Writer(stream).write, _always))


class _Writer:
    """Writes lines to a stream, one at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        with self._lock:
            self._stream.write(f"{line}\n")
            # What is said before a crash must not be lost with it.
            self._stream.flush()


def _always() -> bool:
    return True


# ----------------------------------------------------------------------
# Standard streams that a process can rely on: open from its first line on, and harmless where writes fail
# ----------------------------------------------------------------------

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _LossyStream(io.TextIOWrapper):
    """A stream that drops text that cannot be written: its reader has left, or its disk is full.

    The stream has no buffer: an interrupt may be raised behind any write, and a buffer would be written again then.
    """

    def write(self, text: str, /) -> int:
        """Write text, or drop it; returns its length."""
        try:
            return super().write(text)
        except OSError:
            return len(text)


def open_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next socket or file gets that number, and what is printed goes there.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - no path; kept open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def ignore_failed_writes(*names: Literal["stdout", "stderr"]) -> None:
    """Drop what cannot be written to these streams, instead of raising; does nothing to a stream that was replaced."""
    for name in names:
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        raw: Any = io.FileIO(stream.fileno(), "w", closefd=False)
        lossy = _LossyStream(raw, stream.encoding, stream.errors, write_through=True)
        setattr(sys, name, lossy)
        setattr(sys, f"__{name}__", lossy)
