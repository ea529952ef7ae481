"""What operators and clients are told when the Python file of a custom node fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, ServerError
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.work.user_code.places import SourceLine, at_place, describe, place_in, place_of, trimmed

__all__ = ["UserFile"]

log = structlog.get_logger(__name__)

_EXECUTION: Final = "NODE_LIBRARY_EXECUTION_FAILED"


class UserFile(NodeIdentity):
    """The file of one node, for messages; clients are told only the type of what it raises if errors are hidden."""

    def __init__(self, node: str, path: Path, *, hide_errors: bool = False) -> None:
        super().__init__(node, path)
        self._hide_errors = hide_errors

    def report(self, error: BaseException, step: str) -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        exc_info = (type(error), error, trimmed(error))
        log.error("a custom node raised", node=self.name, file=str(self.path), step=step, exc_info=exc_info)

    def failure(self, error: BaseException, function: Callable[..., Any]) -> ServerError:
        """Log what ``execute`` raised and make the error of the call: errors of the server's own pass unchanged."""
        self.report(error, "execute")
        if isinstance(error, ServerError):
            return error
        if self._hide_errors:
            return self.failed(_EXECUTION, type(error).__name__)
        return self.failed(
            _EXECUTION, at_place(describe(error), place_in(self.path.parent, error) or place_of(function))
        )

    def wrong(self, code: str, detail: str, function: Callable[..., Any]) -> CustomNodeFailure:
        """Make the error of a call that gave something that cannot be used."""
        failure = self.failed(code, at_place(detail, place_of(function)))
        log.error("a custom node gave wrong outputs", node=self.name, file=str(self.path), reason=str(failure))
        return failure

    def raised_while_loading(self, error: BaseException, code: str, step: str) -> ServerError:
        """Log what user code raised while it was loaded, and make the error of loading."""
        self.report(error, step)
        if isinstance(error, ConfigError):
            return error
        place = place_in(self.path.parent, error)
        line = self.line_of(place)
        told = at_place(describe(error), place if line is None else None)
        return ConfigError([self.problem(code, f"{step} raised {told}", line=line)])

    def line_of(self, place: SourceLine | None) -> int | None:
        """Give the line of a place, if it is in the file."""
        return place.line if place is not None and place.file == str(self.path) else None
