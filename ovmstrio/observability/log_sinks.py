"""Where log lines end: standard output and standard error, and files."""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
from typing import Final, Literal, Protocol

from ovmstrio.core.line_streams import original_stream

__all__ = ["FileSink", "LogSink", "StandardSink"]

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
        self._write_bytes(stream.fileno(), f"{text}\n".encode(stream.encoding, "backslashreplace"))

    def _write_bytes(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        piece = len(data) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIECE
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while left:
            if self._is_given_up:
                return
            if not room.poll(_PATIENCE_MS):
                continue
            try:
                left = left[os.write(descriptor, left[:piece]) :]
            except BlockingIOError:
                continue

    def give_up(self) -> None:
        """Write nothing any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Leave it open, for it is the process's."""


class FileSink:
    """A file, as a handler of the standard library writes it, which may put it away and begin another.

    Ownership: the handler.
    """

    def __init__(self, handler: logging.FileHandler) -> None:
        self._handler = handler
        self._is_given_up = False

    @property
    def handler(self) -> logging.FileHandler:
        """What writes."""
        return self._handler

    def write(self, text: str) -> None:
        """Write lines, unless it was given up."""
        if not self._is_given_up:
            self._handler.emit(logging.makeLogRecord({"msg": text}))

    def give_up(self) -> None:
        """Write nothing any more."""
        self._is_given_up = True

    def close(self) -> None:
        """Close the file."""
        if not self._is_given_up:
            self._handler.close()
