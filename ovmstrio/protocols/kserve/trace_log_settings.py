"""Triton's trace and log settings, shared by gRPC and REST."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import structlog

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest, NotSupported
from ovmstrio.telemetry.log_levels import LOG_LEVEL, format_log_levels, parse_log_levels
from ovmstrio.util.truncation import cut, shown

log = structlog.get_logger(__name__)

TRACE_SETTINGS: Final = {"trace_level": ["OFF"], "trace_rate": ["0"], "trace_count": ["0"], "log_frequency": ["0"]}
"""Triton's traces are not written."""

_VERBOSE: Final = "log_verbose_level"
_LEVELS: Final = {
    _VERBOSE: logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
"""Triton's settings and the log levels that they enable, lowest first."""
_LOGGER_LEVELS: Final = "log_levels"  # Additional setting: levels of individual loggers
_OFF: Final = logging.CRITICAL
_ABOVE: Final = dict(zip(_LEVELS, [*list(_LEVELS.values())[1:], _OFF], strict=True))
_FIXED: Final = {"log_file": "--log_path", "log_format": "--log_format"}
_MAX_SHOWN_CHARACTERS: Final = 80
_MAX_SHOWN_NAMES: Final = 8


def check_trace_settings(names: list[str], levels: list[str]) -> None:
    """Raise ``NotSupported`` unless the settings turn traces off."""
    if names != ["trace_level"] or levels not in (["OFF"], []):
        raise NotSupported(
            "Triton traces are not supported, only trace_level OFF; for request times see /v2/models/stats, /metrics, "
            f"or the request log ({_VERBOSE} 1 or --log_level DEBUG)"
        )


def log_settings() -> dict[str, bool | int | str]:
    """Return the current log settings in Triton's form."""
    least = LOG_LEVEL.value
    on = {name: least <= level for name, level in _LEVELS.items()}
    return {
        "log_file": LOG_LEVEL.path,
        "log_info": on["log_info"],
        "log_warning": on["log_warning"],
        "log_error": on["log_error"],
        _VERBOSE: int(on[_VERBOSE]),
        "log_format": "ISO8601",
        _LOGGER_LEVELS: format_log_levels(LOG_LEVEL.parts),
    }


def change_log_settings(changes: Mapping[str, Any]) -> None:
    """Change the log level: enabling a level enables all higher ones, disabling it disables all lower ones.

    Raises ``FailedPrecondition`` if an embedding program owns the log, ``NotSupported`` for settings fixed at start.
    """
    if not changes:
        return
    _check_own_log()
    current = log_settings()
    unknown = [cut(name, _MAX_SHOWN_CHARACTERS) for name in changes if name not in current][:_MAX_SHOWN_NAMES]
    if unknown:
        raise InvalidRequest(f"log settings: {', '.join(unknown)} not known, expected some of {', '.join(current)}")
    for name, option in _FIXED.items():
        if changes.get(name, current[name]) != current[name]:
            raise NotSupported(
                f"{name}: expected {current[name]!r}, got {shown(changes[name], _MAX_SHOWN_CHARACTERS)}; "
                f"fixed at start by {option}"
            )
    if _LOGGER_LEVELS in changes:
        _set_logger_levels(changes[_LOGGER_LEVELS])
    on = [name for name in _LEVELS if name in changes and _is_on(name, changes[name])]
    off = [name for name in _LEVELS if name in changes and name not in on]
    _apply(on, off)


def _set_logger_levels(text: object) -> None:
    try:
        parts = parse_log_levels(text if isinstance(text, str) else shown(text, _MAX_SHOWN_CHARACTERS))
    except ValueError as error:
        raise InvalidRequest(f"{_LOGGER_LEVELS}: {error}") from None
    if parts != LOG_LEVEL.parts:
        LOG_LEVEL.set_logger_levels(parts)
        log.info("logger levels changed", levels=format_log_levels(parts))


def set_log_level(level: int) -> None:
    """Set the lowest logged level (``logging`` number), unless an embedding program owns the log."""
    _check_own_log()
    if level != LOG_LEVEL.value:
        LOG_LEVEL.set(level)
        log.info("log level changed", from_level=logging.getLevelName(level))


def _check_own_log() -> None:
    if not LOG_LEVEL.is_begun:
        raise FailedPrecondition("log settings belong to the embedding program")


def _is_on(name: str, value: object) -> bool:
    if name == _VERBOSE and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value > 0
    if name != _VERBOSE and isinstance(value, bool):
        return value
    expected = "an integer, 0 for none" if name == _VERBOSE else "true or false"
    raise InvalidRequest(f"{name}: expected {expected}, got {shown(value, _MAX_SHOWN_CHARACTERS)}")


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
