"""Logging of errors in handler code, and their conversion to errors for the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from ovmstrio.core.errors import ServerError, UserCodeError, error_type
from ovmstrio.handlers.http_responses import HTTPError, convert_starlette_error
from ovmstrio.isolation.user_code import describe_error, error_location, trim_traceback

INTERNAL_ERROR: Final = "internal server error"
"""Message for callers instead of the details of an error."""

log = structlog.get_logger(__name__)


class ErrorReporter:
    """Reporter of errors in the code of one handler.

    Exceptions in ``passing`` end a call without being failures. ``log_fields`` are for lines that the handler prints.
    """

    def __init__(self, project: str, folder: Path, passing: tuple[type[BaseException], ...] = ()) -> None:
        self.log_fields = {"handler": project}
        self._project = project
        self._folder = folder
        self._passing: tuple[type[BaseException], ...] = (HTTPError, UserCodeError, *passing)

    def convert_error(self, error: BaseException, step: str) -> Exception:
        """Log an exception of user code and return the exception to raise instead.

        Errors with a status, and server errors, are returned unchanged. The text of other errors is only logged.
        """
        chosen = convert_starlette_error(error) or error
        if isinstance(chosen, Exception) and isinstance(chosen, self._passing):
            return chosen
        self.report(error, step)
        if isinstance(error, ServerError):
            return error
        failure = UserCodeError(INTERNAL_ERROR, detail=self.describe(error))
        failure.user_type = error_type(error)
        return failure

    def invalid_result(self, step: str, problem: str) -> UserCodeError:
        """Log an invalid result of user code and return the error to raise."""
        log.error("invalid handler result", project=self._project, method=step, problem=problem)
        return UserCodeError(INTERNAL_ERROR, detail=problem)

    def report(self, error: BaseException, step: str) -> None:
        """Log an exception of user code, with the traceback limited to user frames."""
        log.error(
            "handler raised",
            project=self._project,
            method=step,
            error=self.describe(error),
            exc_info=(type(error), error, trim_traceback(error)),
        )

    def describe(self, error: BaseException) -> str:
        """Return type, message, file and line of an error."""
        place = error_location(self._folder, error)
        return describe_error(error) + ("" if place is None else f" ({place})")
