"""Error messages of failed starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from ovmstrio.core.errors import ConfigError, ServerError
from ovmstrio.util.truncation import format_error

if TYPE_CHECKING:
    from collections.abc import Iterator

log = structlog.get_logger(__name__)


def flatten_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from flatten_errors(each)


def error_message(error: BaseException, *, with_traceback: bool = False) -> str | None:
    """Return the message of an expected error, or None for an unexpected one.

    ``with_traceback`` prepends the traceback of user code.
    """
    if isinstance(error, ConfigError):
        text = "\n       ".join(str(problem).rstrip() for problem in error.problems)
        if with_traceback and error.__cause__ is not None:
            return format_error(error.__cause__) + text
        return text
    if isinstance(error, ServerError):
        return error.message
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return f"{error.strerror or error}{where}{notes}"
    return None


def log_failures(group: BaseExceptionGroup[Any]) -> None:
    """Log one line per error; expected errors have no traceback."""
    for error in flatten_errors(group):
        reason = error.message if isinstance(error, ServerError) else error_message(error)
        if reason is None:
            log.error("failed to start api", exc_info=error)
        else:
            log.error("failed to start api", reason=reason)
