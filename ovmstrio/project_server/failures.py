"""Why a project's server could not start, or ended, as its log tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from ovmstrio.core.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["log_failures"]

log = structlog.get_logger(__name__)


def log_failures(group: BaseExceptionGroup[Any]) -> None:
    """Log a line for each of the errors; those that the server means to tell need no traceback."""
    for error in _leaves(group):
        if isinstance(error, ServerError):
            log.error("failed to start api", reason=error.message)
        elif isinstance(error, OSError):
            log.error("failed to start api", reason=_reason(error))
        else:
            log.error("failed to start api", exc_info=error)


def _reason(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{error.strerror or error}{where}{notes}"


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
