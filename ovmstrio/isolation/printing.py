"""What code of users prints, as lines of the log that say whose it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Final

import structlog

from ovmstrio.util.stdio import STREAM_NAMES, LineStream, StreamName, code_names

__all__ = ["log_printed", "prints_logged"]

log = structlog.get_logger("ovmstrio.printed")

_is_logging: Final[ContextVar[bool]] = ContextVar("a printed line is being logged", default=False)


def log_printed(line: str, stream: StreamName, names: Mapping[str, str]) -> None:
    """Log a line that the code with these names has printed."""
    # A log that nobody has set up prints its lines itself, as handlers of the user's may.
    token = _is_logging.set(True)
    try:
        log.info(line, stream=stream, **names)
    finally:
        _is_logging.reset(token)


class _Standing:
    """The streams that stand for those of this process as long as a server runs in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._takers_of_all = 0
        self._streams: list[tuple[StreamName, LineStream]] = []

    def enter(self, *, is_all: bool) -> None:
        with self._lock:
            self._takers_of_all += is_all
            self._users += 1
            for name in STREAM_NAMES:
                stream = getattr(sys, name)
                if stream is not None and not isinstance(stream, LineStream):
                    standing = LineStream(stream, partial(_log_line, name), self._is_taken)
                    self._streams.append((name, standing))
                    setattr(sys, name, standing)

    def leave(self, *, is_all: bool) -> None:
        with self._lock:
            self._takers_of_all -= is_all
            self._users -= 1
            if self._users:
                return
            for name, standing in self._streams:
                # A program may have put another one there meanwhile.
                if getattr(sys, name) is standing:
                    setattr(sys, name, standing.original)
            self._streams.clear()

    def _is_taken(self) -> bool:
        is_wanted = self._takers_of_all > 0 or (self._users > 0 and code_names.get() is not None)
        return is_wanted and not _is_logging.get()


_standing: Final = _Standing()


@contextmanager
def prints_logged(*, is_all: bool = False) -> Iterator[None]:
    """Log what code of users prints within the block, wherever in this process it runs; other code prints as ever.

    Args:
        is_all: whether what other code prints is logged as well, such as that of threads which code of users starts.
    """
    _standing.enter(is_all=is_all)
    try:
        yield
    finally:
        _standing.leave(is_all=is_all)


def _log_line(stream: StreamName, line: str) -> None:
    log_printed(line, stream, code_names.get() or {})
