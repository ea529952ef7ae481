"""Log records small enough to be formatted on the event loop, whoever logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from ovmstrio.core.bounded_errors import bounded_info
from ovmstrio.core.texts import cut, is_plain, is_short, shown, text_of

__all__ = ["bounded_record"]

_OWN_TEXT: Final = 32_768
"""Characters of a text of the server's own, which may list many problems."""
_STACK: Final = 16_384
_SHORT: Final = 256
_OF_THE_SERVER: Final = (logging.Logger, logging.LogRecord, Enum)
_SCALARS: Final = frozenset({int, float, bool, type(None)})
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def bounded_record(record: logging.LogRecord) -> logging.LogRecord:
    """Give a record whose texts, values and exception are bounded: itself, or a copy whose message is formatted."""
    if _is_short(record):
        return record
    made = logging.makeLogRecord(vars(record))
    if isinstance(record.msg, dict):  # structlog hands over its event as it is
        made.msg = _bounded_event(record.msg)
    else:
        made.args = _bounded_arguments(record.args)
        made.msg, made.args = cut(made.getMessage()), None
    if made.exc_info and made.exc_info[1] is not None:
        made.exc_info, made.exc_text = bounded_info(made.exc_info), None
    if made.stack_info:
        made.stack_info = cut(made.stack_info, _STACK)
    for name in vars(record).keys() - _OF_RECORDS:
        setattr(made, name, _bounded(getattr(record, name)))
    return made


def _is_short(record: logging.LogRecord) -> bool:
    """Tell so of a record with nothing but numbers and short texts in it, as most are."""
    if record.exc_info or record.stack_info:
        return False
    facts = vars(record)
    values = [facts[name] for name in facts.keys() - _OF_RECORDS]
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
        elif kind not in _SCALARS and not isinstance(value, _OF_THE_SERVER):
            return False
    return True


def _bounded_event(event: dict[str, Any]) -> dict[str, Any]:
    bounded = {key: _bounded(value, _OWN_TEXT) for key, value in event.items() if key != "exc_info"}
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


def _bounded(value: Any, most: int | None = None) -> Any:
    """Give a value, or a text for one that is large."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is str:
        return cut(value) if most is None else cut(value, most)
    if isinstance(value, BaseException):
        return value if is_plain(value) else f"{kind.__name__}({text_of(value)!r})"
    return value if is_short(value) else shown(value)
