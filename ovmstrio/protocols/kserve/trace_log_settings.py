"""What both interfaces say of Triton's settings of traces and logs, and how the latter are changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import structlog

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, NotSupported
from ovmstrio.telemetry.log_levels import LOG_LEVEL, read_log_levels, written_log_levels
from ovmstrio.util.truncation import cut, shown

__all__ = ["TRACE_SETTINGS", "change_log_settings", "check_trace_settings", "log_settings", "set_log_level"]

log = structlog.get_logger(__name__)

TRACE_SETTINGS: Final = {"trace_level": ["OFF"], "trace_rate": ["0"], "trace_count": ["0"], "log_frequency": ["0"]}
"""No traces are written in Triton's form."""

_VERBOSE: Final = "log_verbose_level"
_LEVELS: Final = {
    _VERBOSE: logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
"""Triton's settings and the levels that they turn on here, from the least."""
_PARTS: Final = "log_levels"
"""A setting beside Triton's: levels of parts of the log."""
_OFF: Final = logging.CRITICAL
_ABOVE: Final = dict(zip(_LEVELS, [*list(_LEVELS.values())[1:], _OFF], strict=True))
_FIXED: Final = {"log_file": "--log_path", "log_format": "--log_format"}
_LONGEST: Final = 80
_MOST_NAMES: Final = 8


def check_trace_settings(names: list[str], levels: list[str]) -> None:
    """Let pass what turns traces off.

    Raises:
        NotSupported: anything else.
    """
    if names != ["trace_level"] or levels not in (["OFF"], []):
        raise NotSupported(
            "traces in Triton's form are not written; trace_level may be OFF and nothing else set. How long requests "
            "wait and run is told by /v2/models/stats and /metrics, and by a line of the log for each request with "
            f"{_VERBOSE} 1 (logging) or --log_level DEBUG"
        )


def log_settings() -> dict[str, bool | int | str]:
    """Tell what is logged, in Triton's settings, of which only those of levels can be changed."""
    least = LOG_LEVEL.value
    on = {name: least <= level for name, level in _LEVELS.items()}
    return {
        "log_file": LOG_LEVEL.path,
        "log_info": on["log_info"],
        "log_warning": on["log_warning"],
        "log_error": on["log_error"],
        _VERBOSE: int(on[_VERBOSE]),
        "log_format": "ISO8601",
        _PARTS: written_log_levels(LOG_LEVEL.parts),
    }


def change_log_settings(asked: Mapping[str, Any]) -> None:
    """Log from another level on: what is turned on takes along what is above it, what is turned off what is below.

    Raises:
        FailedPrecondition: the log is that of the program which the server is a part of.
        InvalidRequest: a setting is unknown or of another type, or one is to be off while one below it is to be on.
        NotSupported: a setting is chosen when the server starts.
    """
    if not asked:
        return
    _check_own_log()
    present = log_settings()
    unknown = [cut(name, _LONGEST) for name in asked if name not in present][:_MOST_NAMES]
    if unknown:
        raise InvalidRequest(f"log settings: {', '.join(unknown)} not known, expected some of {', '.join(present)}")
    for name, option in _FIXED.items():
        if asked.get(name, present[name]) != present[name]:
            raise NotSupported(
                f"{name}: expected {present[name]!r}, got {shown(asked[name], _LONGEST)}; "
                f"it is not changed while serving, {option} chooses it at the start"
            )
    if _PARTS in asked:
        _set_parts(asked[_PARTS])
    on = [name for name in _LEVELS if name in asked and _is_on(name, asked[name])]
    off = [name for name in _LEVELS if name in asked and name not in on]
    _apply(on, off)


def _set_parts(text: object) -> None:
    """Give parts of the log levels of their own.

    Raises:
        InvalidRequest: it is not of the form.
    """
    try:
        parts = read_log_levels(text if isinstance(text, str) else shown(text, _LONGEST))
    except ValueError as error:
        raise InvalidRequest(f"{_PARTS}: {error}") from None
    if parts != LOG_LEVEL.parts:
        LOG_LEVEL.set_parts(parts)
        log.info("what is logged of parts was changed", levels=written_log_levels(parts))


def set_log_level(level: int) -> None:
    """Log from a level on, of ``logging``'s numbers.

    Raises:
        FailedPrecondition: the log is that of the program which the server is a part of.
    """
    _check_own_log()
    if level != LOG_LEVEL.value:
        LOG_LEVEL.set(level)
        log.info("what is logged was changed", from_level=logging.getLevelName(level))


def _check_own_log() -> None:
    if not LOG_LEVEL.is_begun:
        raise FailedPrecondition("what is logged is up to the program that the server runs in")


def _is_on(name: str, value: object) -> bool:
    """Read a setting.

    Raises:
        InvalidRequest: it is of another type.
    """
    if name == _VERBOSE and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value > 0
    if name != _VERBOSE and isinstance(value, bool):
        return value
    expected = "a whole number, 0 for none" if name == _VERBOSE else "true or false"
    raise InvalidRequest(f"{name}: expected {expected}, got {shown(value, _LONGEST)}")


def _apply(on: list[str], off: list[str]) -> None:
    least = LOG_LEVEL.value
    if on:
        least = min(least, _LEVELS[on[0]])
    if off:
        if on and _LEVELS[off[-1]] > _LEVELS[on[0]]:
            raise InvalidRequest(
                f"{off[-1]} cannot be off while {on[0]} is on: everything from a level up is logged, in the order "
                f"{', '.join(_LEVELS)}"
            )
        least = max(least, _ABOVE[off[-1]])
    set_log_level(least)
