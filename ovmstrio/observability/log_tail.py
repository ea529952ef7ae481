"""The last lines of the log, for who looks at a server from afar."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ovmstrio.core.texts import cut, text_of
from ovmstrio.observability.bounded_records import bounded_record

__all__ = ["LogTail", "TailLine"]

_KEPT: Final = 500
_LONGEST: Final = 1000
_MOST_FACTS: Final = 24


@dataclass(frozen=True, slots=True)
class TailLine:
    """One line of the log.

    Attributes:
        number: of all lines, from 1.
        at: in seconds since the epoch.
        level: of ``logging``'s numbers.
        logger: who logged it.
        event: what was logged.
        facts: what belongs to it, by name; long values are cut.
    """

    number: int
    at: float
    level: int
    logger: str
    event: str
    facts: dict[str, str]


class LogTail(logging.Handler):
    """Keeps the last five hundred lines that the server logs; may be called by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[TailLine] = deque(maxlen=_KEPT)
        self._numbers = itertools.count(1)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is logged while the block lasts."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def since(self, number: int) -> list[TailLine]:
        """Give those that are kept and came behind a number, oldest first."""
        return [each for each in tuple(self._kept) if each.number > number]

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record, without the lock that others take."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as text."""
        try:
            event, facts = _parts(bounded_record(record))
        except Exception as error:  # noqa: BLE001 - whatever users give to a logger, a line comes out
            event, facts = f"a line cannot be shown: {type(error).__name__}", {}
        line = TailLine(next(self._numbers), record.created, record.levelno, record.name, event, facts)
        self._kept.append(line)


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, str]]:
    message: Any = record.msg
    if not isinstance(message, dict):
        facts = {}
        event = record.getMessage()
    else:
        event = str(message.get("event", ""))
        facts = {
            str(key): cut(str(value), _LONGEST)
            for key, value in itertools.islice(message.items(), _MOST_FACTS)
            if key not in _NOT_FACTS
        }
    given: Any = message.get("exc_info") if isinstance(message, dict) else record.exc_info
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        facts["error"] = cut(f"{type(error).__name__}: {text_of(error)}", _LONGEST)
    return cut(event, _LONGEST), facts


_NOT_FACTS: Final = frozenset({"event", "level", "logger", "timestamp", "exc_info", "stack_info", "_record"})
