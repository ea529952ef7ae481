"""Logger that writes one JSON object per line to standard output.

::

    from cortex_internal.lib.log import logger

    logger.info("received payload", extra={"payload": payload})

Its level is the project's ``log_level``, which the server exports as ``CORTEX_LOG_LEVEL``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, ClassVar, Final, TextIO

__all__ = ["JsonFormatter", "StdoutHandler", "configure_logger", "logger"]

_LEVEL: Final = "CORTEX_LOG_LEVEL"
_RESERVED_KEYS: Final = ("asctime", "levelname", "message", "labels", "process")
_RECORD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "exc_text", "taskName"}
_EXCLUDED_ATTRIBUTES: Final = _RECORD_ATTRIBUTES.union(_RESERVED_KEYS)


class JsonFormatter(logging.Formatter):
    """Formatter of JSON objects with ``asctime``, ``levelname``, ``message``, ``process`` and the keys of ``extra``.

    Values without a JSON form are written as ``str(value)``.  ``extra`` cannot replace ``asctime``, ``levelname``,
    ``message``, ``labels`` and ``process``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = (0, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - name in logging
        """Return the time of a record; the date part is formatted once per second."""
        del datefmt
        second, text = self._second
        if second != int(record.created):
            second = int(record.created)
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = (second, text)
        return f"{text},{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        line: dict[str, Any] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "process": record.process,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _EXCLUDED_ATTRIBUTES}
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        return _encode(line)


class StdoutHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stdout``.

    Attributes:
        outlet: handler that receives all records inside a server and formats them in the same way.
    """

    outlet: ClassVar[logging.Handler | None] = None

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(JsonFormatter())

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record, or pass it to the outlet."""
        return bool(super().handle(record) if self.outlet is None else self.outlet.handle(record))

    @property
    def stream(self) -> TextIO:
        """Standard output; read-only."""
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Standard output; read-only."""
        del value
        raise AttributeError("a StdoutHandler writes to standard output; use logging.StreamHandler for other streams")


def configure_logger(name: str, config_file: str | None = None) -> logging.Logger:
    """Return a logger of that name that writes JSON lines; ``config_file`` is accepted and ignored."""
    del config_file
    named_logger = logging.getLogger(name)
    level = logging.getLevelNamesMapping().get(os.environ.get(_LEVEL, "").upper())
    named_logger.setLevel(logging.INFO if level is None else level)
    named_logger.propagate = False
    if not any(isinstance(handler, StdoutHandler) for handler in named_logger.handlers):
        named_logger.addHandler(StdoutHandler())
    return named_logger


def _encode(line: dict[str, Any]) -> str:
    try:
        text = json.dumps(line, default=_text)
    except (TypeError, ValueError, RecursionError):
        # Keys that are not strings, or a value that contains itself.
        text = json.dumps({name: value if name in _RESERVED_KEYS else _text(value) for name, value in line.items()})
    # JSON does not escape DEL.
    return text.replace("\x7f", "\\u007f")


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - user code must not prevent the log line
        return f"<{type(value).__name__} that cannot be formatted: {type(error).__name__}>"


logger: Final = configure_logger("cortex")
