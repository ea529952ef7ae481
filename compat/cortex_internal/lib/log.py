"""A logger that writes a JSON object a line to standard output.

::

    from cortex_internal.lib.log import logger

    logger.info("received payload", extra={"payload": payload})

Its level is that of the project (``log_level``), which the server exports as ``CORTEX_LOG_LEVEL``.
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
_OWN: Final = ("asctime", "levelname", "message", "labels", "process")
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "exc_text", "taskName"}
_HIDDEN: Final = _OF_RECORDS.union(_OWN)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: ``asctime``, ``levelname``, ``message``, ``process``, and what is extra.

    What is in ``extra`` becomes keys of the object; what JSON does not have is written as its text.  The keys
    ``asctime``, ``levelname``, ``message``, ``labels`` and ``process`` are the logger's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = (0, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - as it is called
        """Give the time of a record, whose date is written once a second."""
        del datefmt
        second, text = self._second
        if second != int(record.created):
            second = int(record.created)
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = (second, text)
        return f"{text},{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        """Give the line of a record."""
        line: dict[str, Any] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "process": record.process,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _HIDDEN}
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        return _written(line)


class StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard output is at the time.

    Attributes:
        outlet: takes the records of all such handlers in a server, which formats them as they do.
    """

    outlet: ClassVar[logging.Handler | None] = None

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(JsonFormatter())

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record, or have it written."""
        return bool(super().handle(record) if self.outlet is None else self.outlet.handle(record))

    @property
    def stream(self) -> TextIO:
        """Standard output; that is not for anybody to set."""
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        del value
        raise AttributeError("a StdoutHandler writes to standard output; use logging.StreamHandler for other streams")


def configure_logger(name: str, config_file: str | None = None) -> logging.Logger:
    """Give a logger of that name that writes JSON lines.

    Args:
        name: of the logger.
        config_file: accepted because handlers pass it; the lines always look the same, and the level is the project's.
    """
    del config_file
    made = logging.getLogger(name)
    level = logging.getLevelNamesMapping().get(os.environ.get(_LEVEL, "").upper())
    made.setLevel(logging.INFO if level is None else level)
    made.propagate = False
    if not any(isinstance(handler, StdoutHandler) for handler in made.handlers):
        made.addHandler(StdoutHandler())
    return made


def _written(line: dict[str, Any]) -> str:
    # JSON itself leaves DEL as it is.
    return _encoded(line).replace("\x7f", "\\u007f")


def _encoded(line: dict[str, Any]) -> str:
    try:
        return json.dumps(line, default=_text)
    except (TypeError, ValueError, RecursionError):
        # Keys that are no text, or a value that contains itself.
        return json.dumps({name: value if name in _OWN else _text(value) for name, value in line.items()})


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - the border of user code: a line must come out whatever is in it
        return f"<{type(value).__name__} that cannot be written: {type(error).__name__}>"


logger: Final = configure_logger("cortex")
