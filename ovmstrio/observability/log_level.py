"""The least level that a process logs: chosen when it starts, changed while it serves, opened further by log files.

Loggers of the standard library decide by it, and those of structlog ask them; so a change holds for whoever logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from ovmstrio.observability.log_trees import loggers_of

__all__ = ["LOG_LEVEL", "LevelCell", "LogLevel"]


class LevelCell(Protocol):
    """Where the processes of one server tell each other of the level; 0 as long as nobody has changed it."""

    @property
    def log_level(self) -> int:
        """What it was changed to last."""
        ...

    @log_level.setter
    def log_level(self, level: int) -> None: ...


class LogLevel:
    """The level of the root logger, of which there is one in a process.

    Attributes:
        path: of the file that gets the log as well; empty for none.
    """

    def __init__(self) -> None:
        self.path = ""
        self._is_begun = False
        self._own = logging.NOTSET
        self._floors: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        self._wanted: list[int] = []
        self._handlers: list[tuple[logging.Handler, int]] = []
        self._cell: LevelCell | None = None

    @property
    def is_begun(self) -> bool:
        """Whether this process's log is the server's; in a program of a user's it is that program's."""
        return self._is_begun

    @property
    def value(self) -> int:
        """The least level that is logged, of ``logging``'s numbers, log files aside."""
        self.follow()
        return self._own

    def begin(self, level: int, floors: Mapping[str, int], path: str = "") -> None:
        """Have the server's log at a level, and some loggers at none below their floors.

        Args:
            level: the least that is logged.
            floors: by names of loggers; with ``NOTSET`` for one that has the level itself, as it asks no other.
            path: of the log's file.
        """
        self._is_begun, self.path, self._floors = True, path, dict(floors)
        self._change(level)
        self.follow()

    @property
    def parts(self) -> Mapping[str, int]:
        """The levels of parts of the log that have their own, by the names that they were given by."""
        return self._parts

    def set_parts(self, levels: Mapping[str, int]) -> None:
        """Give parts of the log levels of their own in this process, in place of those that were given before.

        Args:
            levels: by names of loggers, or short ones of :data:`LOG_TREES`; what lies below has the same.
        """
        for name in self._parts:
            logging.getLogger(loggers_of(name)).setLevel(logging.NOTSET)
        self._parts = dict(levels)
        self._change(self._own)

    @contextmanager
    def shared(self, cell: LevelCell) -> Iterator[None]:
        """Have a level in common with other processes for a while, from what they have agreed on so far."""
        self._cell = cell
        self.follow()
        try:
            yield
        finally:
            self._cell = None

    def set(self, level: int) -> None:
        """Change the level, here and in the processes that share it."""
        if self._cell is not None:
            self._cell.log_level = level
        self._change(level)

    def follow(self) -> None:
        """Take over what another process has changed."""
        if self._cell is not None and self._cell.log_level not in (logging.NOTSET, self._own):
            self._change(self._cell.log_level)

    def open_to(self, level: int) -> None:
        """Let records of a level through for a log file; the handlers that are there before get what they got."""
        if not self._wanted:
            root = logging.getLogger()
            self._own = root.level
            self._handlers = [(handler, handler.level) for handler in root.handlers]
        self._wanted.append(level)
        self._apply()

    def close_to(self, level: int) -> None:
        """Take it back; after the last one, handlers have the levels that they had."""
        self._wanted.remove(level)
        self._apply()
        if not self._wanted:
            for handler, own in self._handlers:
                handler.setLevel(own)
            self._handlers = []

    def _change(self, level: int) -> None:
        self._own = level
        for name, floor in self._floors.items():
            logging.getLogger(name).setLevel(max(floor, level))
        for name, own in self._parts.items():
            logging.getLogger(loggers_of(name)).setLevel(own)
        self._apply()

    def _apply(self) -> None:
        for handler, own in self._handlers:
            handler.setLevel(max(own, min(self._own, *self._parts.values())) if self._parts else max(own, self._own))
        lowest = min(self._wanted, default=self._own)
        logging.getLogger().setLevel(min(self._own, lowest) if self._own else lowest)


LOG_LEVEL: Final = LogLevel()
