"""Lines on their way from whoever logs to where they are written: a thread writes them while a server runs.

A line is formatted where it is logged, bounded (:mod:`.bounded_records`), and waits in a queue.  What the queue has no
room for is dropped and counted, so that an end that nobody reads costs neither time nor memory.  While no server runs
lines are written by whoever logs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import trio

from ovmstrio.core.texts import escape_controls
from ovmstrio.observability.bounded_records import bounded_record
from ovmstrio.observability.log_sinks import LogSink

__all__ = ["WRITER", "LineFormatter", "LogOutlet", "LogWriter"]

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
