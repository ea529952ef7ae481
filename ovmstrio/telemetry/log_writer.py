"""Log output: bounded records, a writer thread, and sinks for standard streams and files.

Lines are formatted by the logging thread and queued.  The queue is bounded: lines beyond it are dropped and counted,
so that a blocked sink costs neither time nor memory.  Without a running server, lines are written synchronously, and
dropped if a pipe has no room for them within a bounded time.
"""

from __future__ import annotations

import errno
import logging
import math
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
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import trio

from ovmstrio.util.regular_files import file_kind, open_regular
from ovmstrio.util.stdio import original_stream
from ovmstrio.util.truncation import bounded_info, cut, escape_controls, is_plain, is_short, shown, text_of

# Sinks

_STANDARD: Final = (1, 2)
"""Descriptors of standard output and standard error."""
_PIPE_BYTES: Final = 4096
"""Bytes that a writable pipe accepts without blocking."""
_POLL_MS: Final = 100


class LogSink:
    """Destination of log lines; used by one thread at a time.

    Attributes:
        longest_wait_seconds: how long a write waits for a pipe without room; 0 after such a wait.
    """

    def __init__(self) -> None:
        self.longest_wait_seconds = math.inf
        self._is_given_up = False

    def write(self, text: str) -> None:
        """Write lines; the last one has no line break.  May block.

        Raises:
            OSError: the lines cannot be written.
        """
        raise NotImplementedError

    def give_up(self) -> None:
        """Make a blocked ``write`` of another thread, and all later ones, write nothing."""
        self._is_given_up = True

    def close(self) -> None:
        """Close resources that the sink opened."""

    def _write_bytes(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        piece = len(data) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIPE_BYTES
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        waited = 0.0
        while left and not self._is_given_up:
            if not room.poll(_POLL_MS):
                waited += _POLL_MS / 1000
                if waited >= self.longest_wait_seconds:
                    self.longest_wait_seconds = 0
                    raise TimeoutError(errno.ETIMEDOUT, "no room in the pipe")
                continue
            with suppress(BlockingIOError):
                left = left[os.write(descriptor, left[:piece]) :]


class StandardSink(LogSink):
    """Current standard output or standard error.

    A full pipe is polled outside of Python's buffers, as their locks would block the exit of the process.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._name = name

    def write(self, text: str) -> None:
        """Write lines."""
        stream = original_stream(getattr(sys, self._name))
        if stream is None or self._is_given_up:
            return
        if stream is not getattr(sys, f"__{self._name}__"):
            stream.write(f"{text}\n")
            stream.flush()
            return
        self._write_bytes(stream.fileno(), f"{text}\n".encode(stream.encoding, "backslashreplace"))


class DescriptorSink(LogSink):
    """An open character device, pipe or socket, owned by the sink."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, text: str) -> None:
        """Write lines."""
        self._write_bytes(self._descriptor, f"{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the descriptor."""
        if not self._is_given_up:
            # An error would end the writer thread, and later lines of all sinks would be lost.
            with suppress(OSError):
                os.close(self._descriptor)


class FileSink(LogSink):
    """A file written by a handler of the standard library, which may rotate it; owns the handler.

    The path is opened again when its file was renamed or removed, as by logrotate, and after :meth:`reopen_all`.
    """

    _reopenings: ClassVar[int] = 0

    def __init__(self, handler: logging.FileHandler) -> None:
        super().__init__()
        self.handler = handler
        self._seen_reopenings = FileSink._reopenings
        # Otherwise the standard library prints a traceback for each failed line.
        handler.handleError = _reraise  # type: ignore[assignment, method-assign]

    def write(self, text: str) -> None:
        """Write lines; raises OSError if the file cannot be written."""
        if self._is_given_up:
            return
        stream = self.handler.stream
        if stream is not None and (self._seen_reopenings != FileSink._reopenings or self._is_moved(stream.fileno())):
            # Until the path can be opened, the old file is written.
            with suppress(OSError):
                self.handler.stream = self.handler._open()  # noqa: SLF001 - documented for subclasses
                stream.close()
        self._seen_reopenings = FileSink._reopenings
        self.handler.emit(logging.makeLogRecord({"msg": text}))

    @staticmethod
    def reopen_all() -> None:
        """Make all sinks open their files again at their next line."""
        FileSink._reopenings += 1

    def _is_moved(self, descriptor: int) -> bool:
        try:
            return not os.path.samestat(os.fstat(descriptor), Path(self.handler.baseFilename).stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the file."""
        if not self._is_given_up:
            with suppress(OSError):
                self.handler.close()


def _reraise(_: logging.LogRecord) -> None:
    raise  # noqa: PLE0704 - called where the error is handled


class LogFileHandler(logging.FileHandler):
    """A ``FileHandler`` for regular files that does not block if another file type has replaced its file."""

    def _open(self) -> TextIOWrapper:
        file = open_regular(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return TextIOWrapper(file, encoding=self.encoding, errors=self.errors)


def open_log_sink(path: Path) -> LogSink:
    """Open the file of ``--log-path`` without blocking.

    Regular files are created or appended to.  A path to the process's own standard output or standard error, such as
    ``/dev/stdout``, uses that stream.  Other character devices and FIFOs with a reader are written.

    Raises:
        OSError: the file cannot be opened, is a FIFO without a reader, or has an unsupported type.
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


# Bounded records

_MAX_TEXT_CHARACTERS: Final = 32_768
"""Maximum characters of the server's own texts, which may list many problems."""
_STACK: Final = 16_384
_SHORT: Final = 256
_LOGGING_TYPES: Final = (logging.Logger, logging.LogRecord, Enum)
_SCALARS: Final = frozenset({int, float, bool, type(None)})
_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def bounded_record(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record with bounded texts, values and traceback; large records are copied."""
    if _is_short(record):
        return record
    made = logging.makeLogRecord(vars(record))
    if isinstance(record.msg, dict):  # structlog passes its event dictionary
        made.msg = _bounded_event(record.msg)
    else:
        made.args = _bounded_arguments(record.args)
        made.msg, made.args = cut(made.getMessage()), None
    if made.exc_info and made.exc_info[1] is not None:
        made.exc_info, made.exc_text = bounded_info(made.exc_info), None
    if made.stack_info:
        made.stack_info = cut(made.stack_info, _STACK)
    for name in vars(record).keys() - _RECORD_FIELDS:
        setattr(made, name, _bounded(getattr(record, name)))
    return made


def _is_short(record: logging.LogRecord) -> bool:
    """Return whether the record has only numbers and short texts, as most do."""
    if record.exc_info or record.stack_info:
        return False
    facts = vars(record)
    values = [facts[name] for name in facts.keys() - _RECORD_FIELDS]
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
        elif kind not in _SCALARS and not isinstance(value, _LOGGING_TYPES):
            return False
    return True


def _bounded_event(event: dict[str, Any]) -> dict[str, Any]:
    bounded = {key: _bounded(value, _MAX_TEXT_CHARACTERS) for key, value in event.items() if key != "exc_info"}
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


def _bounded(value: Any, limit: int | None = None) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is str:
        return cut(value) if limit is None else cut(value, limit)
    if isinstance(value, BaseException):
        return value if is_plain(value) else f"{kind.__name__}({text_of(value)!r})"
    return value if is_short(value) else shown(value)


# Writer

_MAX_QUEUED_CHARACTERS: Final = 4 * 2**20
"""Maximum queued characters."""
_BATCH_CHARACTERS: Final = 64 * 1024
"""Characters written in one call."""
_FLUSH_SECONDS: Final = 2.0
"""Time limit for writing the rest at shutdown."""
_GIVE_UP_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.005
"""Time to collect further lines after the first one."""
_MAX_STUCK_SINKS: Final = 4


class LineFormatter(logging.Formatter):
    """Formatter of one line plus traceback, with control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as the standard library calls it
        """Return the line without the traceback."""
        return escape_controls(super().formatMessage(record), keep="\t")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        """Return the lines of a traceback."""
        return escape_controls(super().formatException(ei), keep="\n\t")


class LogOutlet(logging.Handler):
    """Logging handler that formats records and queues their lines.

    Args:
        sink: destination, owned by the handler.
        writer: the writer; by default that of the process.

    Attributes:
        dropped: lines dropped since the last report.
    """

    def __init__(self, sink: LogSink, writer: LogWriter | None = None) -> None:
        super().__init__()
        self.sink = sink
        self.dropped = 0
        self._writer = WRITER if writer is None else writer

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and format a record without the handler lock, so that slow formatting does not block other threads."""
        passed: Any = self.filter(record)
        if not passed:
            return False
        self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Format and queue a record."""
        try:
            line = self.format(bounded_record(record))
        except Exception as error:  # noqa: BLE001 - any log arguments must give a line
            line = self.line("log record not formatted: %s: %s", record.pathname, type(error).__name__)
        self._writer.put(self, line)

    def line(self, message: str, *args: object, level: int = logging.ERROR) -> str:
        """Format a line of the log system itself."""
        return self.format(logging.LogRecord(__name__, level, __file__, 0, message, args, None))

    def close(self) -> None:
        """Close the sink after all queued lines."""
        super().close()
        self._writer.close_after_queue(self)


class LogWriter:
    """Line writer: in a thread while :meth:`in_thread` is active, synchronously otherwise.

    Args:
        flush_seconds: time limit for a blocked sink at shutdown.

    Attributes:
        dropped: lines dropped since the process started.
    """

    def __init__(self, max_characters: int = _MAX_QUEUED_CHARACTERS, flush_seconds: float = _FLUSH_SECONDS) -> None:
        self.dropped = 0
        self._most_characters = max_characters
        self._flush_seconds = flush_seconds
        # Re-entrant, as a finalizer may log while its thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[tuple[LogOutlet, str | None]] = deque()
        self._waiting = 0
        self._has_thread = False
        self._ending = threading.Event()
        self._at: LogOutlet | None = None

    def put(self, outlet: LogOutlet, line: str) -> None:
        """Queue or write a line; drop it if the queue is full."""
        with self._changed:
            if not self._has_thread:
                # The thread that logs must not wait for ever for a reader.
                sink = outlet.sink
                sink.longest_wait_seconds = min(sink.longest_wait_seconds, self._flush_seconds)
                self._write(outlet, [line])
            elif self._waiting + len(line) > self._most_characters:
                self._drop(outlet, 1)
            else:
                self._waiting += len(line)
                self._append(outlet, line)

    def close_after_queue(self, outlet: LogOutlet) -> None:
        """Close the sink of an outlet after its queued lines."""
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
        """Run the writer thread within the block and write the rest afterwards; does nothing if it already runs."""
        with self._changed:
            is_first, self._has_thread = not self._has_thread, True
        if not is_first:
            yield
            return
        is_over, token = trio.Event(), trio.lowlevel.current_trio_token()

        def notify(_: object) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(is_over.set)

        self._ending.clear()
        trio.lowlevel.start_thread_soon(self._write_all, notify, "log writer")
        try:
            yield
        finally:
            with self._changed:
                self._ending.set()
                self._changed.notify()
            await self._wait_written(is_over)

    async def _wait_written(self, is_over: trio.Event) -> None:
        """Wait until everything is written; give up on blocked sinks after a timeout."""
        seconds = self._flush_seconds
        for _ in range(_MAX_STUCK_SINKS):
            with trio.move_on_after(seconds, shield=True):
                await is_over.wait()
                return
            seconds = _GIVE_UP_SECONDS
            if (stuck := self._at) is not None:
                stuck.sink.give_up()

    def _write_all(self) -> None:
        size = 0
        while (batch := self._take(size)) is not None:
            outlet, lines = batch
            size = sum(map(len, lines))
            if not lines:
                outlet.sink.close()
                continue
            self._at = outlet
            outlet.sink.longest_wait_seconds = math.inf
            self._write(outlet, lines)
            self._at = None

    def _take(self, written: int) -> tuple[LogOutlet, list[str]] | None:
        """Wait and return the next lines of one sink, no lines if the sink is to be closed, or None at the end."""
        with self._changed:
            self._waiting -= written
            is_first = not self._queue
            while not self._queue:
                if self._ending.is_set():
                    self._has_thread = False
                    return None
                self._changed.wait()
        if is_first:
            # Batch lines: each wake-up takes the GIL from working threads.
            self._ending.wait(_GATHER_SECONDS)
        with self._changed:
            outlet, line = self._queue.popleft()
            if line is None:
                return outlet, []
            lines, size = [line], len(line)
            while self._queue and size < _BATCH_CHARACTERS:
                other, line = self._queue[0]
                if other is not outlet or line is None:
                    break
                self._queue.popleft()
                lines.append(line)
                size += len(line)
            return outlet, lines

    def _write(self, outlet: LogOutlet, lines: list[str]) -> None:
        try:
            outlet.sink.write("\n".join(lines))
            if outlet.dropped:
                dropped, outlet.dropped = outlet.dropped, 0
                outlet.sink.write(outlet.line("%d lines dropped", dropped, level=logging.WARNING))
        except Exception:  # noqa: BLE001 - a failing log cannot be logged
            self._drop(outlet, len(lines))

    def _drop(self, outlet: LogOutlet, count: int) -> None:
        with self._changed:
            outlet.dropped += count
            self.dropped += count


WRITER: Final = LogWriter()
"""The log writer of this process."""
