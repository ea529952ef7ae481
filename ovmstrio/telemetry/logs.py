"""Structured logs: one structlog pipeline, rendered for terminals or as JSON lines.

Records of the standard library's ``logging`` (hypercorn, user code) use the same pipeline.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from ovmstrio.core.events import current_event
from ovmstrio.telemetry.log_levels import LEVELS, LOG_LEVEL
from ovmstrio.telemetry.log_rate_limit import FAILURE_LINES
from ovmstrio.telemetry.log_writer import LogOutlet, StandardSink, open_log_sink
from ovmstrio.telemetry.spans import current_or_event_span
from ovmstrio.util.stdio import code_names
from ovmstrio.util.truncation import CONTROLS, escape_controls

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path
    from typing import TextIO

    from structlog.typing import EventDict, ExcInfo, Processor

__all__ = ["LEVELS", "add_call_ids", "add_worker_number", "configure_logs", "set_worker_number"]

# Request ids


def add_call_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add request id, trace id and span id (structlog processor)."""
    call = current_event.get()
    if call is not None and call.request_id:
        event.setdefault("request_id", call.request_id)
    span = current_or_event_span()
    if span is not None:
        event.setdefault("trace_id", span.trace_id)
        event.setdefault("span_id", span.span_id)
    return event


# Worker number

_worker_number: int | None = None


def set_worker_number(number: int | None) -> None:
    """Set the worker index of this process; None for a single-process server or the parent."""
    global _worker_number  # noqa: PLW0603 - one log per process
    _worker_number = number


def add_worker_number(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the worker index (structlog processor)."""
    if _worker_number is not None:
        event.setdefault("worker", _worker_number)
    return event


# Names of user code


def add_code_names(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the names of the user code that logs (structlog processor)."""
    for name, value in (code_names.get() or {}).items():
        event.setdefault(name, value)
    return event


# Configuration

LogFormat = Literal["pretty", "json"]

_NOISY_LOGGERS: Final = ("hypercorn.access", "httpx", "httpx2", "httpcore", "httpcore2", "asyncio", "PIL")
_PROCESSORS: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    add_call_ids,
    add_worker_number,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure_logs(*, level: str = "INFO", fmt: LogFormat = "pretty", path: Path | None = None) -> None:
    """Send all log records to standard error and, if given, to a file.

    Args:
        level: one of :data:`LEVELS`.
        fmt: ``pretty`` for terminals, ``json`` for JSON lines; files have no colors.
        path: log file, opened by :func:`open_log_sink`.

    Raises:
        OSError: ``path`` cannot be opened.
    """
    handlers: list[logging.Handler] = [LogOutlet(StandardSink("stderr"))]
    handlers[0].setFormatter(_formatter(fmt, colors=sys.stderr.isatty()))
    if path is not None:
        file = LogOutlet(open_log_sink(path))
        file.setFormatter(_formatter(fmt, colors=False))
        handlers.append(file)
    logging.basicConfig(handlers=handlers, force=True)
    LOG_LEVEL.begin(LEVELS[level], dict.fromkeys(_NOISY_LOGGERS, logging.WARNING), "" if path is None else str(path))
    _configure_structlog()


def forward_logs(forwarder: logging.Handler) -> None:
    """Send all log records of this worker process to one handler; the server sets the levels."""
    logging.basicConfig(handlers=[forwarder], force=True)
    _configure_structlog()


def _configure_structlog() -> None:
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            FAILURE_LINES.limit,
            *_PROCESSORS,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        # The level may change after loggers are cached.
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _formatter(fmt: LogFormat, *, colors: bool) -> logging.Formatter:
    if fmt == "json":
        rendering: list[Processor] = [
            # Local variables would put request tensors into the log.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        rendering = [_escape_values, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_PROCESSORS, add_code_names],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )


class _Literal:
    """Value whose ``repr`` is its text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_UNQUOTED_FIELDS: Final = frozenset({"event", "level", "logger", "logger_name", "timestamp"})
"""Fields rendered without quotes."""
_PRINTABLE_TYPES: Final = frozenset({bool, float, int, type(None)})
_MULTILINE_FIELDS: Final = frozenset({"exception", "stack"})
"""Multi-line fields."""


def _escape_values(_: Any, __: str, event: EventDict) -> EventDict:
    """Escape control characters: a terminal would interpret them, and a line break would forge a record."""
    if all(name.isprintable() and _is_printable(value) for name, value in event.items()):
        return event
    return {escape_controls(name): _escaped(name, value) for name, value in event.items()}


def _is_printable(value: Any) -> bool:
    return value.isprintable() if type(value) is str else type(value) in _PRINTABLE_TYPES


def _escaped(name: str, value: Any) -> Any:
    if name == "exc_info":
        return value
    if isinstance(value, str):
        if CONTROLS.search(value) is None:
            return value
        if name in _MULTILINE_FIELDS:
            return escape_controls(value, keep="\n")
        return escape_controls(value) if name in _UNQUOTED_FIELDS else _Literal(repr(value))
    if value is None or isinstance(value, int | float):
        return value
    text = str(value) if name in _UNQUOTED_FIELDS else repr(value)
    return value if CONTROLS.search(text) is None else _Literal(escape_controls(text))


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write(escape_controls(text.getvalue(), keep="\n"))


def _to_json(event: Any, **options: Any) -> str:
    """Encode as ASCII; JSON does not escape DEL."""
    return json.dumps(event, **options).replace("\x7f", "\\u007f")
