"""Lines on their way from whoever logs to where they are written: a thread writes them while a server runs.

A line is formatted where it is logged, bounded (:mod:`.bounded_records`), and waits in a queue.  What the queue has no
room for is dropped and counted, so that an end that nobody reads costs neither time nor memory.  While no server runs
lines are written by whoever logs.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from enum import Enum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import trio

from ovmstrio.util.regular_files import file_kind, open_regular
from ovmstrio.util.stdio import original_stream
from ovmstrio.util.truncation import bounded_info, cut, escape_controls, is_plain, is_short, shown, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "WRITER",
    "DescriptorSink",
    "FileSink",
    "LineFormatter",
    "LogFileHandler",
    "LogOutlet",
    "LogSink",
    "LogWriter",
    "StandardSink",
    "bounded_record",
    "open_log_sink",
]

# ----------------------------------------------------------------------
# Where log lines end: standard output and standard error, and files
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Log records small enough to be formatted on the event loop, whoever logs
# ----------------------------------------------------------------------

_OWN_TEXT: Final = 32_768
"""Characters of a text of the server's own, which may list many problems."""
_STACK: Final = 16_384
_SHORT: Final = 256
_OF_THE_SERVER: Final = (logging.Logger, logging.LogRecord, Enum)
_SCALARS: Final = frozenset({int, float, bool, type(None)})
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def bounded_record(record: logging.LogRecord) -> logging.LogRecord:
    """Give a record whose texts, values and exception are bounded: itself, or a copy whose message is formatted."""
    if _is_short(record):
        return record
    made = logging.makeLogRecord(vars(record))
    if isinstance(record.msg, dict):  # structlog hands over its event as it is
        made.msg = _bounded_event(record.msg)
    else:
        made.args = _bounded_arguments(record.args)
        made.msg, made.args = cut(made.getMessage()), None
    if made.exc_info and made.exc_info[1] is not None:
        made.exc_info, made.exc_text = bounded_info(made.exc_info), None
    if made.stack_info:
        made.stack_info = cut(made.stack_info, _STACK)
    for name in vars(record).keys() - _OF_RECORDS:
        setattr(made, name, _bounded(getattr(record, name)))
    return made


def _is_short(record: logging.LogRecord) -> bool:
    """Tell so of a record with nothing but numbers and short texts in it, as most are."""
    if record.exc_info or record.stack_info:
        return False
    facts = vars(record)
    values = [facts[name] for name in facts.keys() - _OF_RECORDS]
    if type(record.msg) is dict:
        if "exc_info" in record.msg:
            return False
        values += record.msg.values()
    else:
        values.append(record.msg)
    if record.args:
        if type(record.args) is not tuple:
            return False
        values += record.args
    for value in values:
        kind = type(value)
        if kind is str:
            if len(value) > _SHORT:
                return False
        elif kind not in _SCALARS and not isinstance(value, _OF_THE_SERVER):
            return False
    return True


def _bounded_event(event: dict[str, Any]) -> dict[str, Any]:
    bounded = {key: _bounded(value, _OWN_TEXT) for key, value in event.items() if key != "exc_info"}
    info = event.get("exc_info")
    if info is True:
        info = sys.exc_info()
    elif isinstance(info, BaseException):
        info = (type(info), info, info.__traceback__)
    if isinstance(info, tuple) and info[1] is not None:
        bounded["exc_info"] = bounded_info(info)
    return bounded


def _bounded_arguments(args: Any) -> Any:
    if isinstance(args, Mapping):
        return {key: _bounded(value) for key, value in args.items()}
    return tuple(map(_bounded, args)) if isinstance(args, tuple) else args


def _bounded(value: Any, most: int | None = None) -> Any:
    """Give a value, or a text for one that is large."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is str:
        return cut(value) if most is None else cut(value, most)
    if isinstance(value, BaseException):
        return value if is_plain(value) else f"{kind.__name__}({text_of(value)!r})"
    return value if is_short(value) else shown(value)


# ----------------------------------------------------------------------
# Lines on their way from whoever logs to where they are written: a thread writes them while a server runs
# ----------------------------------------------------------------------

_MOST_CHARACTERS: Final = 4 * 2**20
"""That may wait to be written."""
_AT_ONCE: Final = 64 * 1024
"""Characters that are written together."""
_FLUSH_SECONDS: Final = 2.0
"""What the end of a server waits for an end that takes no lines."""
_GIVE_UP_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.005
"""How long the first line waits for others, so that they are written together."""
_MOST_STUCK: Final = 4


class LineFormatter(logging.Formatter):
    """Formats a record as one line of text, and its traceback below, with control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as the standard library calls it
        """Return the line without the traceback."""
        return escape_controls(super().formatMessage(record), keep="\t")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        """Return the lines of a traceback."""
        return escape_controls(super().formatException(ei), keep="\n\t")


class LogOutlet(logging.Handler):
    """Formats records and has their lines written to an end.

    Args:
        sink: the end, which belongs to the outlet.
        writer: writes.

    Attributes:
        dropped: lines since the last one that said so.
    """

    def __init__(self, sink: LogSink, writer: LogWriter | None = None) -> None:
        super().__init__()
        self.sink = sink
        self.dropped = 0
        self._writer = WRITER if writer is None else writer

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and format a record, by as many threads at a time as there are: what takes long keeps nobody."""
        passed: Any = self.filter(record)
        if not passed:
            return False
        self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record, and give its line to the writer."""
        try:
            line = self.format(bounded_record(record))
        except Exception as error:  # noqa: BLE001 - whatever users give to a logger, a line comes out
            line = self.line("a line cannot be formatted: %s: %s", record.pathname, type(error).__name__)
        self._writer.put(self, line)

    def line(self, message: str, *args: object, level: int = logging.ERROR) -> str:
        """Format a line of the log's own."""
        return self.format(logging.LogRecord(__name__, level, __file__, 0, message, args, None))

    def close(self) -> None:
        """Close the end once it has got every line before."""
        super().close()
        self._writer.put_end(self)


class _Piece(NamedTuple):
    """Lines for one end, or its end."""

    outlet: LogOutlet
    lines: list[str]
    is_end: bool = False


class LogWriter:
    """Writes lines where they belong: in a thread while there is one, at once otherwise.

    Args:
        most_characters: may wait for the thread.
        flush_seconds: how long the end of the thread waits for an end that takes nothing.

    Attributes:
        dropped: lines, since the process began.
    """

    def __init__(self, most_characters: int = _MOST_CHARACTERS, flush_seconds: float = _FLUSH_SECONDS) -> None:
        self.dropped = 0
        self._most_characters = most_characters
        self._flush_seconds = flush_seconds
        # A finalizer may log while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[tuple[LogOutlet, str | None]] = deque()
        self._waiting = 0
        self._has_thread = False
        self._ending = threading.Event()
        self._at: LogOutlet | None = None

    def put(self, outlet: LogOutlet, line: str) -> None:
        """Have a line written; it is dropped if too much waits already."""
        with self._changed:
            if not self._has_thread:
                self._write(outlet, [line])
            elif self._waiting + len(line) > self._most_characters:
                self._drop(outlet, 1)
            else:
                self._waiting += len(line)
                self._append(outlet, line)

    def put_end(self, outlet: LogOutlet) -> None:
        """Have an outlet's end closed, behind the lines that are for it."""
        with self._changed:
            if self._has_thread:
                self._append(outlet, None)
                return
        outlet.sink.close()

    def _append(self, outlet: LogOutlet, line: str | None) -> None:
        if not self._queue:
            self._changed.notify()
        self._queue.append((outlet, line))

    @asynccontextmanager
    async def in_thread(self) -> AsyncIterator[None]:
        """Write in a thread until the block is left, and then what is left; ends that nobody reads are given up.

        Does nothing where there is such a thread already.

        Ownership: the thread, which ends with the block.

        Cancellation: shielded at the end, for it is bounded.
        """
        with self._changed:
            is_first, self._has_thread = not self._has_thread, True
        if not is_first:
            yield
            return
        is_over, token = trio.Event(), trio.lowlevel.current_trio_token()

        def tell(_: object) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(is_over.set)

        self._ending.clear()
        trio.lowlevel.start_thread_soon(self._write_all, tell, "log writer")
        try:
            yield
        finally:
            with self._changed:
                self._ending.set()
                self._changed.notify()
            await self._see_end(is_over)

    async def _see_end(self, is_over: trio.Event) -> None:
        """Wait until everything is written, and no longer for ends that take nothing.

        Cancellation: shielded, for it is bounded.
        """
        seconds = self._flush_seconds
        for _ in range(_MOST_STUCK):
            with trio.move_on_after(seconds, shield=True):
                await is_over.wait()
                return
            seconds = _GIVE_UP_SECONDS
            if (stuck := self._at) is not None:
                stuck.sink.give_up()

    # In the thread

    def _write_all(self) -> None:
        size = 0
        while (piece := self._take(size)) is not None:
            if piece.is_end:
                piece.outlet.sink.close()
                size = 0
                continue
            size = sum(map(len, piece.lines))
            self._at = piece.outlet
            self._write(piece.outlet, piece.lines)
            self._at = None

    def _take(self, written: int) -> _Piece | None:
        """Wait for lines, and take those that go to the same end together; None if there will be none."""
        with self._changed:
            self._waiting -= written
            is_first = not self._queue
            while not self._queue:
                if self._ending.is_set():
                    self._has_thread = False
                    return None
                self._changed.wait()
        if is_first:
            # Every time that it wakes it takes the interpreter's lock from those who work.
            self._ending.wait(_GATHER_SECONDS)
        with self._changed:
            outlet, line = self._queue.popleft()
            if line is None:
                return _Piece(outlet, [], is_end=True)
            lines, size = [line], len(line)
            while self._queue and size < _AT_ONCE:
                other, line = self._queue[0]
                if other is not outlet or line is None:
                    break
                self._queue.popleft()
                lines.append(line)
                size += len(line)
            return _Piece(outlet, lines)

    # Wherever

    def _write(self, outlet: LogOutlet, lines: list[str]) -> None:
        """Write lines, and how many could not be written before; one that cannot be written is dropped."""
        try:
            outlet.sink.write("\n".join(lines))
            if outlet.dropped:
                dropped, outlet.dropped = outlet.dropped, 0
                outlet.sink.write(outlet.line("%d lines dropped", dropped, level=logging.WARNING))
        except Exception:  # noqa: BLE001 - there is no place left to tell it
            self._drop(outlet, len(lines))

    def _drop(self, outlet: LogOutlet, count: int) -> None:
        with self._changed:
            outlet.dropped += count
            self.dropped += count


WRITER: Final = LogWriter()
"""What writes the lines of this process."""
