"""Log records of worker processes, which the server handles with its own levels and handlers.

::

    server                                     process
    [LOG_LEVELS, {logger: level}]  ──────────> sets its loggers, at the start and after each change
                    <───────────────────────── [LOG_RECORD, record]

The reader of a process's messages handles both. The module needs only what the codec needs.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.isolation.messages import decode_error, encode_error, encode_inline
from ovmstrio.util.truncation import cut, format_error, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOG_LEVELS: Final = -2
"""Number that marks messages with the levels of loggers."""

LOG_RECORD: Final = -3
"""Number that marks log records."""

_PLACE: Final = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName")
_ORIGIN: Final = ("created", "msecs", "process", "threadName")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "_logger", "_name"}
_PLAIN: Final = (bool, int, float, type(None))
_WAIT_SECONDS: Final = 1.0
"""Time for the server to read; later records are dropped."""
_POLL_SECONDS: Final = 0.005


def apply_log_levels(levels: Mapping[str, int]) -> None:
    """Set the levels of loggers; the root logger has an empty name."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class RecordForwarder(logging.Handler):
    """Handler that sends records to the server.

    ``send_now`` sends a packet without blocking, in any thread, and returns whether it was sent.
    """

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._send_now = send_now

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; wait while the server is busy."""
        try:
            packet = _encode_record(record)
        except Exception:  # noqa: BLE001 - user code formats the message
            self.handleError(record)
            return
        until = time.monotonic() + _WAIT_SECONDS
        while not self._send_now(packet) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def _encode_record(record: logging.LogRecord) -> bytes:
    """Return the packet of a record; one that is too large loses its fields and the structure of its error."""
    message, error = record.msg, record.exc_info[1] if record.exc_info else None
    if isinstance(message, dict):  # structlog passes the event
        error = _error_of(message.get("exc_info"))
        message = {name: _plain(value) for name, value in message.items() if name != "exc_info"}
    else:
        message = cut(record.getMessage())
    row = {name: getattr(record, name) for name in (*_PLACE, *_ORIGIN)}
    row["msg"], row["stack_info"] = message, record.stack_info
    fields = {name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD}
    packet = encode_inline([LOG_RECORD, [row, fields, None if error is None else encode_error(error)]])
    if packet is None:
        text = message.get("event", "") if isinstance(message, dict) else message
        text = str(text) if error is None else f"{text}\n{cut(format_error(error))}"
        packet = encode_inline([LOG_RECORD, [{**row, "msg": cut(text), "stack_info": None}, {}, None]])
    return packet or b""


def _error_of(info: Any) -> BaseException | None:
    """Return the exception of structlog's ``exc_info``."""
    if isinstance(info, tuple):
        info = info[1]
    if isinstance(info, BaseException):
        return info
    return sys.exc_info()[1] if info else None


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value) is str:
        return cut(value)
    if type(value) in {list, tuple}:
        return [_plain(one) for one in value]
    if type(value) is dict:
        return {str(name): _plain(one) for name, one in value.items()}
    return text_of(value) if isinstance(value, BaseException) else cut(str(value))


def decode_record(row: Any) -> tuple[logging.LogRecord, dict[str, Any]] | None:
    """Return a record and its additional fields; None if the level of its logger is higher.

    Raises ``MALFORMED_MESSAGE_ERRORS`` exceptions if it is malformed.
    """
    attributes, fields, encoded = row
    if not logging.getLogger(attributes["name"]).isEnabledFor(attributes["levelno"]):
        return None
    record = logging.makeLogRecord({**fields, **attributes})
    error = None if encoded is None else decode_error(encoded)
    info = None if error is None else (type(error), error, error.__traceback__)
    if isinstance(record.msg, dict):
        # These attributes mark an event of structlog.
        record.__dict__ |= {"_logger": None, "_name": record.levelname.lower()}
        if info is not None:
            record.msg["exc_info"] = info
    else:
        record.exc_info = info
    return record, fields
