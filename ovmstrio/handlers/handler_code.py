"""What the log and the caller are told of errors in a handler's code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from ovmstrio.core.errors import ServerError, UserCodeError
from ovmstrio.handlers.http_results import HTTPError, starlette_error
from ovmstrio.isolation.user_code import describe, place_in, trimmed

__all__ = ["HIDDEN", "HandlerCode"]

HIDDEN: Final = "internal server error"
"""What the caller is told of an error that is not for him."""

log = structlog.get_logger(__name__)


class HandlerCode:
    """Whose code it is that fails.

    Args:
        project: its name, for the log.
        folder: where the user's code lies.
        passing: exceptions that user code may end a call with, which are no failures.

    Attributes:
        names: say whose it is in the log of what it prints.
    """

    def __init__(self, project: str, folder: Path, passing: tuple[type[BaseException], ...] = ()) -> None:
        self.names = {"handler": project}
        self._project = project
        self._folder = folder
        self._passing: tuple[type[BaseException], ...] = (HTTPError, UserCodeError, *passing)

    def failure(self, error: BaseException, step: str) -> Exception:
        """Log what user code raised, and make of it what is raised instead.

        Errors that carry a status, and those of the server itself, pass.  The text of all others is for the log.
        """
        chosen = starlette_error(error) or error
        if isinstance(chosen, Exception) and isinstance(chosen, self._passing):
            return chosen
        self.report(error, step)
        if isinstance(error, ServerError):
            return error
        return UserCodeError(HIDDEN, detail=self.described(error))

    def wrong(self, step: str, problem: str) -> UserCodeError:
        """Log that user code gave something that cannot be used, and make the error of it."""
        log.error("a handler's result cannot be used", project=self._project, method=step, problem=problem)
        return UserCodeError(HIDDEN, detail=problem)

    def report(self, error: BaseException, step: str) -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        log.error(
            "a handler raised",
            project=self._project,
            method=step,
            error=self.described(error),
            exc_info=(type(error), error, trimmed(error)),
        )

    def described(self, error: BaseException) -> str:
        """Give an error's type, text and line."""
        place = place_in(self._folder, error)
        return describe(error) + ("" if place is None else f" ({place})")
