"""Structured logs: one pipeline of small functions, rendered for people on a terminal or as JSON lines.

Records of the standard library's ``logging`` (hypercorn, user code) flow through the same pipeline.  What is long in
them is cut, and a thread writes their lines while a server runs (:mod:`.log_writer`).
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final, Literal

import structlog

from ovmstrio.observability.call_ids import add_call_ids
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.log_sinks import StandardSink, open_log_sink
from ovmstrio.observability.log_trees import LEVELS
from ovmstrio.observability.log_writer import LogOutlet
from ovmstrio.observability.worker_number import add_worker_number

if TYPE_CHECKING:
    from pathlib import Path

    from structlog.typing import Processor

__all__ = ["LEVELS", "configure_logs"]

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
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=list(_SHARED),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
