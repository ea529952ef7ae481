"""Log levels of the process and of single loggers; set at start, changed while serving.

The level is that of the standard library's loggers, which structlog asks too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from ovmstrio.util.truncation import shown

# Levels by logger name

LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}
"""OVMS's level names; Python has nothing below DEBUG, so TRACE is the same."""

LOGGER_ALIASES: Final[Mapping[str, str]] = {
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
"""Loggers of loading and unloading."""

_PREFIX: Final = "ovmstrio."
_OTHER_NAMES: Final = ("ovmstrio.printed",)
"""Logger names without a module: output printed by user code."""
_PACKAGE: Final = Path(__file__).parents[1]
_MAX_NAME_CHARACTERS: Final = 200
_MAX_LEVELS_CHARACTERS: Final = 16_384

_NAME: Final = re.compile(r"[A-Za-z_][\w.\-]*")
_FORM: Final = "such as ovmstrio.graphs=debug,ovmstrio.serving=error"


def parse_log_levels(text: str) -> dict[str, int]:
    """Parse levels such as ``ovmstrio.graphs=debug,ovmstrio.remote=warning``.

    Raises:
        ValueError: malformed text, unknown level or unknown logger.
    """
    if len(text) > _MAX_LEVELS_CHARACTERS:
        raise ValueError(f"expected at most {_MAX_LEVELS_CHARACTERS} characters, got {len(text)}")
    levels: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, level = (each.strip() for each in part.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(f"expected names and levels {_FORM}, got {shown(part, 80)}")
        number = LEVELS.get(level.upper())
        if number is None:
            raise ValueError(f"{name}: expected one of {', '.join(LEVELS)}, got {shown(level, 80)}")
        if not _is_known(name):
            packages = (folder.parent.name for folder in _PACKAGE.glob("*/__init__.py"))
            names = sorted({*packages, *(each.removeprefix(_PREFIX) for each in (*LOGGER_ALIASES, *_OTHER_NAMES))})
            raise ValueError(f"unknown logger {shown(name, 80)}; expected {_PREFIX} and one of {', '.join(names)}")
        levels[name] = number
    return levels


def _is_known(name: str) -> bool:
    """Return whether a logger of the server exists; other loggers cannot be checked."""
    if not name.startswith(_PREFIX) or name in _OTHER_NAMES:
        return True
    place = _PACKAGE.joinpath(*logger_name(name).split(".")[1:])
    return len(name) <= _MAX_NAME_CHARACTERS and (place.is_dir() or place.with_suffix(".py").is_file())


def format_log_levels(levels: Mapping[str, int]) -> str:
    """Format levels as :func:`parse_log_levels` parses them."""
    return ",".join(f"{name}={logging.getLevelName(level).lower()}" for name, level in levels.items())


def logger_name(name: str) -> str:
    """Return the logger of a short name or of a name below it."""
    for short, logger in (*LOGGER_ALIASES.items(), *_EARLIER_NAMES.items()):
        if name == short or name.startswith(f"{short}."):
            return logger + name.removeprefix(short)
    return name


# Process log level


class SharedLogLevel(Protocol):
    """Log level shared by all workers; 0 until changed."""

    @property
    def log_level(self) -> int:
        """The shared level."""

    @log_level.setter
    def log_level(self, level: int) -> None: ...


class LogLevel:
    """Level of the root logger; one per process.

    Attributes:
        path: log file, or empty.
    """

    def __init__(self) -> None:
        self.path = ""
        self._is_begun = False
        self._own = logging.NOTSET
        self._floors: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        self._changed: set[str] = set()
        self._file_levels: list[int] = []
        self._handlers: list[tuple[logging.Handler, int]] = []
        self._cell: SharedLogLevel | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def is_begun(self) -> bool:
        """True if the server configured the log of this process, and not an embedding program."""
        return self._is_begun

    @property
    def value(self) -> int:
        """Effective level, apart from log files with a lower level."""
        self.follow()
        return self._own

    def begin(self, level: int, floors: Mapping[str, int], path: str = "") -> None:
        """Set the level and the minimum levels of some loggers.

        Args:
            level: level of the root logger.
            floors: minimum levels by logger name; ``NOTSET`` for a logger that does not propagate levels from its
                parent.
            path: log file.
        """
        self._is_begun, self.path, self._floors = True, path, dict(floors)
        self._change(level)
        self.follow()

    @property
    def parts(self) -> Mapping[str, int]:
        """Levels of single loggers, by configured name."""
        return self._parts

    def set_logger_levels(self, levels: Mapping[str, int]) -> None:
        """Replace the levels of single loggers in this process.

        Args:
            levels: levels by logger name or short name of :data:`LOGGER_ALIASES`; children inherit them.
        """
        for name in self._parts:
            logging.getLogger(logger_name(name)).setLevel(logging.NOTSET)
        self._parts = dict(levels)
        self._changed.update(map(logger_name, levels))
        self._change(self._own)

    @contextmanager
    def shared(self, cell: SharedLogLevel) -> Iterator[None]:
        """Share the level with other workers within the block."""
        self._cell = cell
        self.follow()
        try:
            yield
        finally:
            self._cell = None

    def set(self, level: int) -> None:
        """Change the level, in all workers if shared."""
        if self._cell is not None:
            self._cell.log_level = level
        self._change(level)

    def follow(self) -> None:
        """Apply a change made by another worker."""
        if self._cell is not None and self._cell.log_level not in (logging.NOTSET, self._own):
            self._change(self._cell.log_level)

    def add_file_level(self, level: int) -> None:
        """Lower the root level for a log file; existing handlers keep their level."""
        if not self._file_levels:
            root = logging.getLogger()
            self._own = root.level
            self._handlers = [(handler, handler.level) for handler in root.handlers]
        self._file_levels.append(level)
        self._apply()

    def remove_file_level(self, level: int) -> None:
        """Undo :meth:`open_to`; restores the handler levels at the end."""
        self._file_levels.remove(level)
        self._apply()
        if not self._file_levels:
            for handler, own in self._handlers:
                handler.setLevel(own)
            self._handlers = []

    def levels(self) -> dict[str, int]:
        """Return the levels of the root logger, whose name is empty, and of single loggers, for another process."""
        return {name: logging.getLogger(name).level for name in ("", *self._floors, *self._changed)}

    @contextmanager
    def watched(self, changed: Callable[[], None]) -> Iterator[None]:
        """Call ``changed`` after each change within the block."""
        self._watchers.append(changed)
        try:
            yield
        finally:
            self._watchers.remove(changed)

    def _change(self, level: int) -> None:
        self._own = level
        for name, floor in self._floors.items():
            logging.getLogger(name).setLevel(max(floor, level))
        for name, own in self._parts.items():
            logging.getLogger(logger_name(name)).setLevel(own)
        self._apply()

    def _apply(self) -> None:
        for handler, own in self._handlers:
            handler.setLevel(max(own, min(self._own, *self._parts.values())) if self._parts else max(own, self._own))
        lowest = min(self._file_levels, default=self._own)
        logging.getLogger().setLevel(min(self._own, lowest) if self._own else lowest)
        for changed in self._watchers:
            changed()


LOG_LEVEL: Final = LogLevel()
