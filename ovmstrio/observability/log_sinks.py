"""Where log lines end: standard output and standard error, and files."""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final, Literal, Protocol

from ovmstrio.core.line_streams import original_stream
from ovmstrio.util.regular_files import file_kind, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DescriptorSink", "FileSink", "LogFileHandler", "LogSink", "StandardSink", "open_log_sink"]

_STANDARD: Final = (1, 2)
"""Descriptors of standard output and standard error."""
_PIECE: Final = 4096
"""What a pipe that can be written to takes without a wait."""
_PATIENCE_MS: Final = 100


class LogSink(Protocol):
    """An end that lines are written to, by one thread at a time."""

    def write(self, text: str) -> None:
        """Write lines, whose last one has no line break; may block.

        Raises:
            OSError: they cannot be written.
        """
        ...

    def give_up(self) -> None:
        """Have a ``write`` that waits in another thread, and all that follow, write nothing."""
        ...

    def close(self) -> None:
        """Close what it has opened."""
        ...


class StandardSink:
    """Standard output or standard error, whatever that is at the time.

    Nobody need read it: a pipe that is full is waited for outside of Python's buffers, whose locks would keep the
    process from its end.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._is_given_up = False

    def write(self, text: str) -> None:
        """Write lines, unless it was given up."""
        stream = original_stream(getattr(sys, self._name))
        if stream is None or self._is_given_up:
            return
        if stream is not getattr(sys, f"__{self._name}__"):
            stream.write(f"{text}\n")
            stream.flush()
            return
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
        _write_bytes(stream.fileno(), data, lambda: self._is_given_up)

    def give_up(self) -> None:
        """Write nothing any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Leave it open, for it is the process's."""


class DescriptorSink:
    """An open character device, pipe or socket.  A write that waits for a reader ends when the sink is given up.

    Ownership: the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_given_up = False

    def write(self, text: str) -> None:
        """Write lines, unless the sink was given up."""
        _write_bytes(self._descriptor, f"{text}\n".encode(errors="backslashreplace"), lambda: self._is_given_up)

    def give_up(self) -> None:
        """Write nothing any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Close the descriptor."""
        if not self._is_given_up:
            os.close(self._descriptor)


def open_log_sink(path: Path) -> LogSink:
    """Open the file that ``--log_path`` names; the call does not block.

    Regular files are appended to and created.  A path to the process's own standard output or standard error, such as
    ``/dev/stdout``, uses that stream, whatever its type.  Other character devices and FIFOs with a reader are written.

    Raises:
        OSError: the file cannot be opened, is a FIFO without a reader, or has a type that cannot be written.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return FileSink(LogFileHandler(path, encoding="utf-8"))
    for descriptor in _STANDARD:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), found):
                return DescriptorSink(os.dup(descriptor))
    if stat.S_ISREG(found.st_mode):
        return FileSink(LogFileHandler(path, encoding="utf-8"))
    if not stat.S_ISCHR(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
        raise OSError(errno.EINVAL, f"expected a regular file, got {file_kind(found.st_mode)}", str(path))
    try:
        return DescriptorSink(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        text = f"{file_kind(found.st_mode)} without a reader; start the reader first, or name a regular file"
        raise OSError(errno.ENXIO, text, str(path)) from None


class LogFileHandler(logging.FileHandler):
    """A ``FileHandler`` that opens regular files only, and does not block when another file has replaced its own."""

    def _open(self) -> TextIOWrapper:
        file = open_regular(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return TextIOWrapper(file, encoding=self.encoding, errors=self.errors)


def _write_bytes(descriptor: int, data: bytes, is_given_up: Callable[[], bool]) -> None:
    left = memoryview(data)
    piece = len(data) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIECE
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while left:
        if is_given_up():
            return
        if not room.poll(_PATIENCE_MS):
            continue
        try:
            left = left[os.write(descriptor, left[:piece]) :]
        except BlockingIOError:
            continue


class FileSink:
    """A file, as a handler of the standard library writes it, which may put it away and begin another.

    Ownership: the handler.
    """

    def __init__(self, handler: logging.FileHandler) -> None:
        self._handler = handler
        # The standard library would print a traceback for each line that cannot be written.
        handler.handleError = _raise_again  # type: ignore[assignment, method-assign]
        self._is_given_up = False

    @property
    def handler(self) -> logging.FileHandler:
        """What writes."""
        return self._handler

    def write(self, text: str) -> None:
        """Write lines, unless it was given up.

        Raises:
            OSError: the file cannot be written to.
        """
        if not self._is_given_up:
            self._handler.emit(logging.makeLogRecord({"msg": text}))

    def give_up(self) -> None:
        """Write nothing any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Close the file."""
        if not self._is_given_up:
            # What its buffer still holds cannot be written either.
            with suppress(OSError):
                self._handler.close()


def _raise_again(_: logging.LogRecord) -> None:
    raise  # noqa: PLE0704 - called where the error is handled
