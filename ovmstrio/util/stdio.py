"""Standard streams: line buffering per thread and task, attribution of lines to user code, and valid descriptors.

The module needs only the standard library, because interpreters chosen by users import it as well.
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
# Output of user code as complete lines, from many threads and tasks
# ----------------------------------------------------------------------

StreamName = Literal["stdout", "stderr"]

STREAM_NAMES: Final[tuple[StreamName, ...]] = ("stdout", "stderr")

code_names: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("user code names", default=None)
"""Log fields that name the user code that runs in this context; None for the server's own code."""

_MAX_LINES: Final = 1000
"""Lines of one ``write``; further lines are only counted."""

_DEBUGGERS: Final = frozenset({"bdb", "cmd", "pdb"})
"""Modules that print for the user at the terminal."""

_NO_LINES: Final[Mapping[LineStream, str]] = MappingProxyType({})

_unfinished: Final[ContextVar[Mapping[LineStream, str]]] = ContextVar("unfinished lines", default=_NO_LINES)


@contextmanager
def attribute_output_to(names: Mapping[str, str] | None) -> Iterator[None]:
    """Attribute output to the user code with these names, in the block and in threads and tasks that it starts."""
    token = code_names.set(names)
    try:
        yield
    finally:
        finish_lines()
        code_names.reset(token)


def finish_lines() -> None:
    """Write the unfinished lines of this context."""
    if texts := _unfinished.get():
        _unfinished.set(_NO_LINES)
        for stream, text in texts.items():
            stream.finish(text)


def split_lines(begun: str, text: str) -> tuple[list[str], str]:
    """Return the complete lines of a text, truncated, and the visible part of its unfinished last line.

    Text before a carriage return is left out, as a terminal overwrites it.  Empty lines are left out as well.
    """
    *ended, rest = (begun + text).split("\n")
    lines = [cut(visible) for line in ended if (visible := _visible_part(line)).strip()]
    return lines, (_visible_part(rest) if len(rest) > MOST_CHARACTERS else rest)[: 2 * MOST_CHARACTERS]


def _visible_part(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


class LineStream:
    """A text stream that passes complete lines to a callback while the callback accepts them.

    Each thread and task has its own unfinished line.  A line ends with its line break or with the call of user code
    (:func:`finish_lines`); ``flush`` does not end a line.  All other attributes are those of the original stream.

    Args:
        original: the stream.
        take: called with each line, without its line break.
        is_taken: returns whether lines of the current context go to ``on_line``.
    """

    def __init__(self, original: TextIO, take: Callable[[str], None], is_taken: Callable[[], bool]) -> None:
        self.original = original
        self._take = take
        self._is_taken = is_taken

    def write(self, text: str) -> int:
        """Write a text.

        Raises:
            TypeError: the argument is not a string.
        """
        writer = sys._getframe(1)  # noqa: SLF001 - finds the writing module
        if not self._is_taken() or writer.f_globals.get("__name__") in _DEBUGGERS:
            return self.original.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begun = _unfinished.get()
        lines, rest = split_lines(begun.get(self, ""), text)
        if rest or begun:
            # A new mapping, because contexts that were copied from this one share the old mapping.
            others = {stream: line for stream, line in begun.items() if stream is not self}
            _unfinished.set({**others, self: rest} if rest else others)
        for line in lines[:_MAX_LINES]:
            self._take(line)
        if len(lines) > _MAX_LINES:
            self._take(f"... ({len(lines)} lines)")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write strings that include their line breaks."""
        for line in lines:
            self.write(line)

    def finish(self, text: str) -> None:
        """Send a line without a line break to the callback."""
        for line in split_lines("", f"{text}\n")[0]:
            self._take(line)

    def flush(self) -> None:
        """Flush the stream; an unfinished line is not written."""
        self.original.flush()

    def isatty(self) -> bool:
        """Return whether output of the current context goes to a terminal."""
        return not self._is_taken() and self.original.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def original_stream(stream: Any) -> Any:
    """Return the original stream of a :class:`LineStream`; other streams as they are."""
    return stream.original if isinstance(stream, LineStream) else stream


def install_line_buffering() -> None:
    """Replace the standard streams so that this process prints complete lines, one write per line."""
    for name in STREAM_NAMES:
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, LineStream(stream, _LineWriter(stream).write, _always))


class _LineWriter:
    """Writer of lines to a stream, one at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        with self._lock:
            self._stream.write(f"{line}\n")
            # Output before a crash must not be lost in a buffer.
            self._stream.flush()


def _always() -> bool:
    return True


# ----------------------------------------------------------------------
# Robust standard streams: always open, failed writes ignored or the end of the command
# ----------------------------------------------------------------------

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _LossyStream(io.TextIOWrapper):
    """A stream that drops text after write errors, such as a closed pipe or a full disk.

    The stream has no buffer: an interrupt may be raised after any write, and a buffer would then be written again.
    """

    def write(self, text: str, /) -> int:
        """Write text, or drop it; return its length."""
        try:
            return super().write(text)
        except OSError:
            return len(text)


class ExitingFile(io.FileIO):
    """File of a standard stream; the first failed write prints the reason and raises ``SystemExit(1)``.

    A reader that has closed the pipe, such as ``head``, needs no message. Further writes go to /dev/null, so that no
    second error follows while the interpreter ends.

    Attributes:
        has_failed: True after a failed write; code that was interrupted may have caught ``SystemExit``.
    """

    has_failed = False

    def write(self, data: Any, /) -> int:
        """Write bytes, and return their number."""
        try:
            return super().write(data)
        except OSError as error:
            self.has_failed = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                sys.stderr.write(f"error: standard output: {error.strerror}\n")
            raise SystemExit(1) from None


def exit_on_failed_writes() -> ExitingFile:
    """Replace standard output by a stream whose failed writes end the command; return its file."""
    stream = sys.stdout
    file = ExitingFile(1, "w", closefd=False)
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return file
    # Python has no buffer below the text layer if its streams are unbuffered.
    buffer: Any = file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file)
    replaced = io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    for name in ("stdout", "__stdout__"):
        setattr(sys, name, replaced)
    return file


def open_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next socket or file gets that descriptor, and printed text goes there.
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
    """Drop text after write errors of these streams, instead of raising; skip streams that were replaced."""
    for name in names:
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        raw: Any = io.FileIO(stream.fileno(), "w", closefd=False)
        lossy = _LossyStream(raw, stream.encoding, stream.errors, write_through=True)
        setattr(sys, name, lossy)
        setattr(sys, f"__{name}__", lossy)
