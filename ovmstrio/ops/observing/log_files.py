"""Log files of a running pipeline: ``pipeline.log``, its warnings in ``pipeline.log.wf``, and ``pipeline.tracer``.

They open at server start, never on import.  User code's ``logging`` records go to them too.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.log_writer import FileSink, LineFormatter, LogFileHandler, LogOutlet

if TYPE_CHECKING:
    from ovmstrio.ops.settings import LoggingSettings

# Identity of log lines

SAMPLES: Final[ContextVar[tuple[tuple[int, int], ...]]] = ContextVar("samples", default=())
"""Data id and log id of the samples that the current task or thread processes, for log lines."""

PIPELINE: Final[ContextVar[str]] = ContextVar("pipeline", default="")
"""Pipeline name of the current task or thread; empty for none."""


def log_fields_of(op: str) -> dict[str, str]:
    """Return the log fields for output of an Op's code."""
    pipeline = PIPELINE.get()
    return {"servable": pipeline, "op": op} if pipeline else {"op": op}


class current_samples:  # noqa: N801 - used like a function; a class takes half the calls of a generator
    """Context manager that sets the current samples for log lines; trio threads inherit the value."""

    __slots__ = ("_samples", "_token")

    def __init__(self, *samples: tuple[int, int]) -> None:
        self._samples = samples

    def __enter__(self) -> None:
        self._token: Token[tuple[tuple[int, int], ...]] = SAMPLES.set(self._samples)

    def __exit__(self, *_: object) -> None:
        SAMPLES.reset(self._token)


def current_ids() -> str:
    """Return the current ids in log format, such as ``(data_id=1 log_id=0)``; empty outside requests."""
    return " ".join(f"(data_id={data_id} log_id={log_id})" for data_id, log_id in SAMPLES.get())


# Files

DIRECTORY_VARIABLE: Final = "SERVING_LOG_PATH"
"""Environment variable with the parent directory of the log directory; default is the current directory."""

_DIRECTORY: Final = "PipelineServingLogs"
_MAX_BYTES: Final = 512_000_000
_RECORD_FILES: Final = ("pipeline.log", "pipeline.log.wf")
_BACKUPS: Final = {"pipeline.log": 20, "pipeline.log.wf": 10, "pipeline.tracer": 5}
_LINE: Final = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(ids)s%(message)s"
_TRACER_LINE: Final = "%(asctime)s %(message)s"
_RATE_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Open log files of a pipeline."""

    directory: Path
    _tracer: logging.Handler
    _log: logging.Handler

    def note(self, line: str) -> None:
        """Write an INFO line to ``pipeline.log`` only, if its level allows INFO."""
        if self._log.level <= logging.INFO:
            self._log.handle(logging.LogRecord("pipeline", logging.INFO, __file__, 0, line, (), None))

    def trace(self, line: str) -> None:
        """Write a line to ``pipeline.tracer``."""
        self._tracer.handle(logging.LogRecord("pipeline.tracer", logging.INFO, "", 0, line, (), None))


def log_directory(folder: Path | None = None) -> Path:
    """Return the log directory, below the folder if there is one."""
    return (folder or Path(os.environ.get(DIRECTORY_VARIABLE) or ".")) / _DIRECTORY


@contextmanager
def open_log_files(settings: LoggingSettings) -> Iterator[LogFiles | None]:
    """Attach the log files to the root logger within the block; yields None if they are disabled.

    Files in a separate folder receive only records of the current pipeline.  Raises ConfigError if not writable.
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
            message = f"log files cannot be created: {error.strerror or error}"
            hint = f"set {DIRECTORY_VARIABLE} to a writable directory"
            raise ConfigError([Problem(message, str(directory), suggestion=hint)]) from None
        handlers["pipeline.tracer"].setFormatter(LineFormatter(_TRACER_LINE))
        record_handlers = [handlers[name] for name in _RECORD_FILES]
        if settings.folder is not None:
            for handler in record_handlers:
                handler.addFilter(_PipelineFilter(PIPELINE.get()))
        opened.enter_context(_attach(record_handlers, settings))
        yield LogFiles(directory, handlers["pipeline.tracer"], handlers["pipeline.log"])


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
    outlet = LogOutlet(FileSink(file))
    try:
        yield outlet
    finally:
        outlet.close()


@contextmanager
def _attach(handlers: Sequence[logging.Handler], settings: LoggingSettings) -> Iterator[None]:
    for handler, level in zip(handlers, (settings.level, max(logging.WARNING, settings.level)), strict=True):
        handler.setLevel(level)
        handler.setFormatter(_LineFormatter(_LINE))
        if settings.rate_limit is not None:
            handler.addFilter(_RateLimit(settings.rate_limit))
    root = logging.getLogger()
    LOG_LEVEL.add_file_level(settings.level)
    try:
        for handler in handlers:
            root.addHandler(handler)
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        LOG_LEVEL.remove_file_level(settings.level)


class _RotatingHandler(LogFileHandler, logging.handlers.RotatingFileHandler):
    """Rotating file handler over the log writer."""


class _PipelineFilter(logging.Filter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        del record
        return PIPELINE.get() == self._name


class _LineFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        copy = logging.makeLogRecord(record.__dict__)
        # Records of worker processes have their ids.
        copy.ids = f"{ids} " if (ids := getattr(record, "ids", "") or current_ids()) else ""
        if isinstance(record.msg, dict):  # structlog passes the event dict
            copy.msg, copy.args = _flat(record.msg), ()
            copy.exc_info = record.msg.get("exc_info")
        if suppressed := getattr(record, "suppressed", 0):
            copy.msg, copy.args = f"{copy.getMessage()} ({suppressed} similar lines suppressed)", ()
        return super().format(copy)


_INTERNAL: Final = frozenset({"event", "level", "logger", "timestamp", "exc_info", "stack_info"})


def _flat(event: dict[str, Any]) -> str:
    pairs = [f"{key}={value}" for key, value in event.items() if key not in _INTERNAL and not key.startswith("_")]
    return " ".join([str(event.get("event", "")), *pairs])


class _RateLimit(logging.Filter):
    """Limit of lines per second and call site; the next written line counts the suppressed ones."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._written: dict[tuple[str, int], deque[float]] = {}
        self._suppressed: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        call_site = (record.pathname, record.lineno)
        written = self._written.setdefault(call_site, deque(maxlen=self._limit))
        now = time.monotonic()
        if len(written) == self._limit and now - written[0] < _RATE_WINDOW_S:
            self._suppressed[call_site] = self._suppressed.get(call_site, 0) + 1
            return False
        written.append(now)
        record.suppressed = self._suppressed.pop(call_site, 0)
        return True
