"""The least level that a process logs: chosen when it starts, changed while it serves, opened further by log files.

Loggers of the standard library decide by it, and those of structlog ask them; so a change holds for whoever logs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

__all__ = [
    "LEVELS",
    "LOADING_LOGGERS",
    "LOG_LEVEL",
    "LOG_TREES",
    "LevelCell",
    "LogLevel",
    "loggers_of",
    "read_log_levels",
    "written_log_levels",
]

# ----------------------------------------------------------------------
# Levels of parts of the log, by the names that users see: ``ovmstrio.graphs=debug,ovmstrio.remote=warning``
# ----------------------------------------------------------------------

LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}
"""OVMS's level names; Python has nothing below DEBUG, so TRACE is the same as DEBUG."""

LOG_TREES: Final[Mapping[str, str]] = {
    "ovmstrio.grpc": "ovmstrio.transport.grpc",
    "ovmstrio.http": "ovmstrio.transport.http",
    "ovmstrio.requests": "ovmstrio.telemetry.access_log",
}
"""Short names, with the loggers that they select."""
_EARLIER_NAMES: Final[Mapping[str, str]] = {
    "ovmstrio.access": "ovmstrio.auth",
    "ovmstrio.api": "ovmstrio.protocols",
    "ovmstrio.generation": "ovmstrio.text",
    "ovmstrio.registry": "ovmstrio.serving",
}
"""Names of the last release, with the loggers that they select now."""

LOADING_LOGGERS: Final = tuple(
    f"ovmstrio.serving.{name}" for name in ("instances", "load_order", "loading", "model_control", "source")
)
"""Loggers of loading and retiring services."""

_OWN: Final = "ovmstrio."
_FURTHER: Final = ("ovmstrio.printed",)
"""What has no file of its name: what code of users prints."""
_PACKAGE: Final = Path(__file__).parents[1]
_LONGEST: Final = 200
_MAX_LEVELS_CHARACTERS: Final = 16_384

_NAME: Final = re.compile(r"[A-Za-z_][\w.\-]*")
_FORM: Final = "such as ovmstrio.graphs=debug,ovmstrio.serving=error"


def read_log_levels(text: str) -> dict[str, int]:
    """Read levels by names.

    Raises:
        ValueError: it is not of the form, a level is none, or the server has no such part; the text says what is wrong.
    """
    if len(text) > _MAX_LEVELS_CHARACTERS:
        raise ValueError(f"expected at most {_MAX_LEVELS_CHARACTERS} characters, got {len(text)}")
    levels: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, level = (each.strip() for each in part.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(f"expected names and levels {_FORM}, got {part[:80]!r}")
        number = LEVELS.get(level.upper())
        if number is None:
            raise ValueError(f"{name}: expected one of {', '.join(LEVELS)}, got {level[:80]!r}")
        if not _is_known(name):
            below = ", ".join(each.removeprefix(_OWN) for each in (*LOG_TREES, *_FURTHER))
            raise ValueError(
                f"nothing logs as {name[:80]!r}; below {_OWN} are {below}, and its packages by their names"
            )
        levels[name] = number
    return levels


def _is_known(name: str) -> bool:
    """Tell whether anything may log under a name; of others than the server's own nobody knows."""
    if not name.startswith(_OWN) or name in _FURTHER:
        return True
    place = _PACKAGE.joinpath(*loggers_of(name).split(".")[1:])
    return len(name) <= _LONGEST and (place.is_dir() or place.with_suffix(".py").is_file())


def written_log_levels(levels: Mapping[str, int]) -> str:
    """Write levels as :func:`read_log_levels` reads them."""
    return ",".join(f"{name}={logging.getLevelName(level).lower()}" for name, level in levels.items())


def loggers_of(name: str) -> str:
    """Give the logger that a name stands for, which may be a part of what a short name stands for."""
    for short, logger in (*LOG_TREES.items(), *_EARLIER_NAMES.items()):
        if name == short or name.startswith(f"{short}."):
            return logger + name.removeprefix(short)
    return name


# ----------------------------------------------------------------------
# The least level that a process logs: chosen when it starts, changed while it serves, opened further by log files
# ----------------------------------------------------------------------


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
