"""Errors in user code: what the log shows of them and what the client is told."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.graphs.calculator import NodeFailure
from ovmstrio.work.user_code.places import SourceLine, at_place, describe, place_in, trimmed

__all__ = ["EXECUTION_ERROR", "UserCode"]

log = structlog.get_logger(__name__)

EXECUTION_ERROR: Final = "Error occurred during graph execution"


class UserCode:
    """Whose code it is that fails: names for the log, the folder in which its files lie."""

    __slots__ = ("folder", "graph", "hide_errors", "node")

    def __init__(self, graph: str, node: str, folder: Path, *, hide_errors: bool = False) -> None:
        self.graph = graph
        self.node = node
        self.folder = folder
        self.hide_errors = hide_errors

    def failure(
        self, error: BaseException, step: str, *, request_id: str = "", otherwise: SourceLine | None = None
    ) -> Exception:
        """Log what user code raised and make of it what is raised instead: errors of the server's own pass unchanged.

        ``otherwise`` is the place to name where no line of the user's was reached.
        """
        self.report(error, step, request_id=request_id)
        if isinstance(error, ServerError):
            return error
        told = type(error).__name__ if self.hide_errors else at_place(describe(error), self.place(error) or otherwise)
        return NodeFailure(f"{EXECUTION_ERROR}: {told}")

    def report(self, error: BaseException, step: str, *, request_id: str = "") -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        log.error(
            "a Python node raised",
            step=step,
            graph=self.graph,
            node=self.node,
            request_id=request_id,
            exc_info=(type(error), error, trimmed(error)),
        )

    def wrong(self, problem: object) -> NodeFailure:
        """Make the failure of user code that gave back something wrong."""
        return NodeFailure(EXECUTION_ERROR if self.hide_errors else f"{EXECUTION_ERROR}: {problem}")

    def place(self, error: BaseException) -> SourceLine | None:
        """Give the line of the user's that an error comes from: the innermost in the handler's folder."""
        return place_in(self.folder, error)
