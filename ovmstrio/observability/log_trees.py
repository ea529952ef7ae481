"""Levels of parts of the log, by the names that users see: ``ovmstrio.graphs=debug,ovmstrio.remote=warning``.

A name stands for everything below it.  Where a part of the server lies deeper, its short name is enough.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["LEVELS", "LOG_TREES", "loggers_of", "read_log_levels", "written_log_levels"]

LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}
"""OVMS's level names; Python has nothing below DEBUG, so TRACE is the same as DEBUG."""

LOG_TREES: Final[Mapping[str, str]] = {
    **{
        f"ovmstrio.{name}": f"ovmstrio.runtimes.{name}"
        for name in ("generation", "graphs", "handlers", "models", "ops", "pipelines", "remote")
    },
    "ovmstrio.grpc": "ovmstrio.wire.grpc",
    "ovmstrio.http": "ovmstrio.wire.http",
    "ovmstrio.requests": "ovmstrio.observability.request_log",
}
"""Short names, and the loggers that they stand for."""

_OWN: Final = "ovmstrio."
_FURTHER: Final = ("ovmstrio.printed",)
"""What has no file of its name: what code of users prints."""
_PACKAGE: Final = Path(__file__).parents[1]
_LONGEST: Final = 200
_MAX_LEVELS_CHARACTERS: Final = 16_384

_NAME: Final = re.compile(r"[A-Za-z_][\w.\-]*")
_FORM: Final = "such as ovmstrio.graphs=debug,ovmstrio.registry=error"


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
    for short, logger in LOG_TREES.items():
        if name == short or name.startswith(f"{short}."):
            return logger + name.removeprefix(short)
    return name
