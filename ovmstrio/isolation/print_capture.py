"""Log records of user-code output: captured prints and forwarded records, with the user code's names as fields."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import structlog

from ovmstrio.isolation.side_messages import decode_record
from ovmstrio.util.stdio import STREAM_NAMES, LineStream, StreamName, code_names

log = structlog.get_logger("ovmstrio.printed")


class _Logging(threading.local):
    """Flag of a thread that logs a printed line; the line is logged in one thread, without a checkpoint."""

    is_active = False


_logging: Final = _Logging()


def log_printed_line(line: str, stream: StreamName, names: Mapping[str, str]) -> None:
    """Log a line printed by the code with these names."""
    # An unconfigured log prints its lines itself, as user log handlers may do.
    before, _logging.is_active = _logging.is_active, True
    try:
        log.info(line, stream=stream, **names)
    finally:
        _logging.is_active = before


def log_forwarded_record(row: Any, names: Mapping[str, str]) -> None:
    """Handle a record of a worker process that runs the code with these names, if its level is logged."""
    decoded = decode_record(row)
    if decoded is None:
        return
    record, fields = decoded
    token = code_names.set({**names, **fields})
    before, _logging.is_active = _logging.is_active, True
    try:
        logging.getLogger(record.name).handle(record)
    finally:
        _logging.is_active = before
        code_names.reset(token)


class _CapturedStreams:
    """Replacements of sys.stdout and sys.stderr, installed while at least one server runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._capture_all_count = 0
        self._streams: list[tuple[StreamName, LineStream]] = []

    def enter(self, *, is_all: bool) -> None:
        with self._lock:
            self._capture_all_count += is_all
            self._users += 1
            for name in STREAM_NAMES:
                stream = getattr(sys, name)
                if stream is not None and not isinstance(stream, LineStream):
                    captured = LineStream(stream, partial(_log_line, name), self._is_captured)
                    self._streams.append((name, captured))
                    setattr(sys, name, captured)

    def leave(self, *, is_all: bool) -> None:
        with self._lock:
            self._capture_all_count -= is_all
            self._users -= 1
            if self._users:
                return
            for name, captured in self._streams:
                # Another program may have replaced the stream meanwhile.
                if getattr(sys, name) is captured:
                    setattr(sys, name, captured.original)
            self._streams.clear()

    def _is_captured(self) -> bool:
        is_captured = self._capture_all_count > 0 or (self._users > 0 and code_names.get() is not None)
        return is_captured and not _logging.is_active


_captured: Final = _CapturedStreams()


@contextmanager
def log_prints(*, is_all: bool = False) -> Iterator[None]:
    """Log what user code prints in this process during the block; with ``is_all`` also output of other code."""
    _captured.enter(is_all=is_all)
    try:
        yield
    finally:
        _captured.leave(is_all=is_all)


def _log_line(stream: StreamName, line: str) -> None:
    log_printed_line(line, stream, code_names.get() or {})
