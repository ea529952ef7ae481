"""Structured logs: one pipeline of small functions, rendered for people on a terminal or as JSON lines.

Records of the standard library's ``logging`` (hypercorn, user code) flow through the same pipeline.  What is long in
them is cut, and a thread writes their lines while a server runs (:mod:`.log_writer`).
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
from ovmstrio.telemetry.log_writer import LogOutlet, StandardSink, open_log_sink
from ovmstrio.telemetry.spans import span_in_hand
from ovmstrio.util.truncation import CONTROLS, escape_controls

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path
    from typing import TextIO

    from structlog.typing import EventDict, ExcInfo, Processor

__all__ = ["LEVELS", "add_call_ids", "add_worker_number", "configure_logs", "set_worker_number"]

# ----------------------------------------------------------------------
# The ids of the call that runs, in every line that is logged meanwhile, in threads and tasks of the call too
# ----------------------------------------------------------------------


def add_call_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the ids of the request and, where it is traced, of its trace and span; a processor of structlog's."""
    call = current_event.get()
    if call is not None and call.request_id:
        event.setdefault("request_id", call.request_id)
    span = span_in_hand()
    if span is not None:
        event.setdefault("trace_id", span.trace_id)
        event.setdefault("span_id", span.span_id)
    return event


# ----------------------------------------------------------------------
# The number of a process among those that are one server, in every line that it logs
# ----------------------------------------------------------------------

_number: int | None = None


def set_worker_number(number: int | None) -> None:
    """Say which one this process is; None if it is the server alone, or what the others are started by."""
    global _number  # noqa: PLW0603 - a process is one, and its log is one
    _number = number


def add_worker_number(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the number, if there is one; a processor of structlog's."""
    if _number is not None:
        event.setdefault("worker", _number)
    return event


# ----------------------------------------------------------------------
# Structured logs: one pipeline of small functions, rendered for people on a terminal or as JSON lines
# ----------------------------------------------------------------------

LogFormat = Literal["pretty", "json"]

_TALKATIVE: Final = ("hypercorn.access", "httpx", "httpcore", "asyncio", "PIL")
_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    add_call_ids,
    add_worker_number,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure_logs(*, level: str = "INFO", fmt: LogFormat = "pretty", path: Path | None = None) -> None:
    """Send every log record to standard error, and to ``path`` as well where one is given.

    Args:
        level: one of :data:`LEVELS`.
        fmt: ``pretty`` for people, ``json`` for one object a line; a file always gets the plain form of either.
        path: a file to append to, as :func:`open_log_sink` opens it.

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
    LOG_LEVEL.begin(LEVELS[level], dict.fromkeys(_TALKATIVE, logging.WARNING), "" if path is None else str(path))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        # The level may change while loggers are kept.
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _formatter(fmt: LogFormat, *, colors: bool) -> logging.Formatter:
    if fmt == "json":
        rendering: list[Processor] = [
            # Local variables would put callers' tensors into the log.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        rendering = [
            _escape_values,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback),
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=list(_SHARED),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )


class _Literal:
    """A value that the console shows as the text says."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_BARE: Final = frozenset({"event", "level", "logger", "logger_name", "timestamp"})
"""Fields that the console shows without quotation marks."""
_PRINTABLE: Final = frozenset({bool, float, int, type(None)})
_TRACES: Final = frozenset({"exception", "stack"})
"""Fields whose texts have several lines."""


def _escape_values(_: Any, __: str, event: EventDict) -> EventDict:
    """Escape control characters in all fields: the console would obey them, and a line break would forge a record."""
    if all(name.isprintable() and _is_printable(value) for name, value in event.items()):
        return event
    return {escape_controls(name): _escaped(name, value) for name, value in event.items()}


def _is_printable(value: Any) -> bool:
    return value.isprintable() if type(value) is str else type(value) in _PRINTABLE


def _escaped(name: str, value: Any) -> Any:
    if name == "exc_info":
        return value
    if isinstance(value, str):
        if CONTROLS.search(value) is None:
            return value
        if name in _TRACES:
            return escape_controls(value, keep="\n")
        return escape_controls(value) if name in _BARE else _Literal(repr(value))
    if value is None or isinstance(value, int | float):
        return value
    text = str(value) if name in _BARE else repr(value)
    return value if CONTROLS.search(text) is None else _Literal(escape_controls(text))


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write(escape_controls(text.getvalue(), keep="\n"))


def _to_json(event: Any, **options: Any) -> str:
    """Encode as ASCII; JSON itself leaves DEL as it is."""
    return json.dumps(event, **options).replace("\x7f", "\\u007f")
