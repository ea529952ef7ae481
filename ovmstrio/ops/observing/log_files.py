"""The log files of a running pipeline: ``pipeline.log``, its warnings in ``pipeline.log.wf``, and ``pipeline.tracer``.

They are opened when a server starts, never on import.  What user code says to ``logging`` lands in them too.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.observing.figures import PIPELINE, current_ids
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.log_writer import FileSink, LineFormatter, LogFileHandler, LogOutlet

if TYPE_CHECKING:
    from ovmstrio.ops.settings import LoggingSettings

__all__ = ["DIRECTORY_VARIABLE", "LogFiles", "join_log_files", "log_directory", "open_log_files"]

DIRECTORY_VARIABLE: Final = "SERVING_LOG_PATH"
"""The environment variable that names the directory in which the log directory is made; the current one if not set."""

_DIRECTORY: Final = "PipelineServingLogs"
_MAX_BYTES: Final = 512_000_000
_OF_RECORDS: Final = ("pipeline.log", "pipeline.log.wf")
_BACKUPS: Final = {"pipeline.log": 20, "pipeline.log.wf": 10, "pipeline.tracer": 5}
_LINE: Final = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(ids)s%(message)s"
_TRACER_LINE: Final = "%(asctime)s %(message)s"
_RATE_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The open files: where they are, and the way to the tracer's own."""

    directory: Path
    _tracer: logging.Handler
    _log: logging.Handler

    def note(self, line: str) -> None:
        """Write a line into ``pipeline.log`` alone, as INFO, if it is open for that."""
        if self._log.level <= logging.INFO:
            self._log.handle(logging.LogRecord("pipeline", logging.INFO, __file__, 0, line, (), None))

    def trace(self, line: str) -> None:
        """Write a line of the tracer."""
        self._tracer.handle(logging.LogRecord("pipeline.tracer", logging.INFO, "", 0, line, (), None))


def log_directory(folder: Path | None = None) -> Path:
    """Give the directory that the files of a server that starts now are in, or those of a pipeline with a folder."""
    return (folder or Path(os.environ.get(DIRECTORY_VARIABLE) or ".")) / _DIRECTORY


@contextmanager
def open_log_files(settings: LoggingSettings) -> Iterator[LogFiles | None]:
    """Let the root logger write into the files as well, until the block is left; None if they are turned off.

    Files in a folder of their own get what the pipeline says that the block is entered for.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    if not settings.enabled:
        yield None
        return
    directory = log_directory(settings.folder)
    with ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handlers = {name: opened.enter_context(_written(_rotating(directory, name, settings))) for name in _BACKUPS}
        except OSError as error:
            message = f"the log files cannot be made: {error.strerror or error}"
            hint = f"set {DIRECTORY_VARIABLE} to a directory that can be written to"
            raise ConfigError([Problem(message, str(directory), suggestion=hint)]) from None
        handlers["pipeline.tracer"].setFormatter(LineFormatter(_TRACER_LINE))
        of_records = [handlers[name] for name in _OF_RECORDS]
        if settings.folder is not None:
            for handler in of_records:
                handler.addFilter(_OfPipeline(PIPELINE.get()))
        opened.enter_context(_attached(of_records, settings))
        yield LogFiles(directory, handlers["pipeline.tracer"], handlers["pipeline.log"])


@contextmanager
def join_log_files(settings: LoggingSettings) -> Iterator[None]:
    """Let the root logger of a worker process write into the files of its server, until the block is left.

    The server alone puts files away, which this follows.  Where the server has no files, there are none here.
    """
    directory = log_directory(settings.folder)
    with ExitStack() as opened:
        if settings.enabled and all((directory / name).is_file() for name in _OF_RECORDS):
            files = (_FollowingHandler(directory / name, encoding="utf-8") for name in _OF_RECORDS)
            opened.enter_context(_attached([opened.enter_context(_written(file)) for file in files], settings))
        yield


def _rotating(directory: Path, name: str, settings: LoggingSettings) -> logging.handlers.RotatingFileHandler:
    return _RotatingHandler(
        directory / name,
        maxBytes=_MAX_BYTES if settings.max_bytes is None else settings.max_bytes,
        backupCount=_BACKUPS[name] if settings.backups is None else settings.backups,
        encoding="utf-8",
        delay=False,
    )


@contextmanager
def _written(file: logging.FileHandler) -> Iterator[LogOutlet]:
    """Give the way into a file, which is closed behind the last line."""
    outlet = LogOutlet(FileSink(file))
    try:
        yield outlet
    finally:
        outlet.close()


@contextmanager
def _attached(handlers: Sequence[logging.Handler], settings: LoggingSettings) -> Iterator[None]:
    """Let the root logger write to ``pipeline.log`` and ``pipeline.log.wf`` for a while, whatever else it writes to."""
    for handler, level in zip(handlers, (settings.level, max(logging.WARNING, settings.level)), strict=True):
        handler.setLevel(level)
        handler.setFormatter(_LineFormatter(_LINE))
        if settings.rate_limit is not None:
            handler.addFilter(_RateLimit(settings.rate_limit))
    root = logging.getLogger()
    LOG_LEVEL.open_to(settings.level)
    try:
        for handler in handlers:
            root.addHandler(handler)
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        LOG_LEVEL.close_to(settings.level)


class _RotatingHandler(LogFileHandler, logging.handlers.RotatingFileHandler):
    """Renames a full file and begins another."""


class _FollowingHandler(LogFileHandler, logging.handlers.WatchedFileHandler):
    """Opens a file again that another process has renamed."""


class _OfPipeline(logging.Filter):
    """Lets through what is said for one pipeline."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is the pipeline's."""
        del record
        return PIPELINE.get() == self._name


class _LineFormatter(LineFormatter):
    """Names the samples at work on every line, and renders structured records as ``event key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Give one line, with its traceback below it."""
        copy = logging.makeLogRecord(record.__dict__)
        copy.ids = f"{ids} " if (ids := current_ids()) else ""
        if isinstance(record.msg, dict):  # structlog hands over its event as it is
            copy.msg, copy.args = _flat(record.msg), ()
            copy.exc_info = record.msg.get("exc_info")
        if left_out := getattr(record, "left_out", 0):
            copy.msg, copy.args = f"{copy.getMessage()} ({left_out} more of these were left out)", ()
        return super().format(copy)


_INTERNAL: Final = frozenset({"event", "level", "logger", "timestamp", "exc_info", "stack_info"})


def _flat(event: dict[str, Any]) -> str:
    pairs = [f"{key}={value}" for key, value in event.items() if key not in _INTERNAL and not key.startswith("_")]
    return " ".join([str(event.get("event", "")), *pairs])


class _RateLimit(logging.Filter):
    """Lets one place in the code write so many lines a second; the next line after says how many were left out."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._written: dict[tuple[str, int], deque[float]] = {}
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is written."""
        place = (record.pathname, record.lineno)
        written = self._written.setdefault(place, deque(maxlen=self._limit))
        now = time.monotonic()
        if len(written) == self._limit and now - written[0] < _RATE_WINDOW_S:
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return False
        written.append(now)
        record.left_out = self._left_out.pop(place, 0)
        return True
