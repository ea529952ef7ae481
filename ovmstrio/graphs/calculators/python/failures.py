"""Errors in user code: what the log shows of them and what the client is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import structlog
import trio

import ovmstrio
import pyovms
from ovmstrio.errors import ServerError
from ovmstrio.graphs.calculator import NodeFailure

__all__ = ["EXECUTION_ERROR", "Place", "UserCode", "describe", "place_of", "trimmed"]

log = structlog.get_logger(__name__)

EXECUTION_ERROR: Final = "Error occurred during graph execution"

_MACHINERY: Final = tuple(
    str(Path(module.__file__).parent) + "/" for module in (ovmstrio, trio, pyovms) if module.__file__ is not None
)


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class UserCode:
    """Whose code it is that fails: names for the log, the folder in which its files lie."""

    __slots__ = ("folder", "graph", "hide_errors", "node")

    def __init__(self, graph: str, node: str, folder: Path, *, hide_errors: bool = False) -> None:
        self.graph = graph
        self.node = node
        self.folder = folder
        self.hide_errors = hide_errors

    def failure(
        self, error: BaseException, step: str, *, request_id: str = "", otherwise: Place | None = None
    ) -> Exception:
        """Log what user code raised and make of it what is raised instead: errors of the server's own pass unchanged.

        ``otherwise`` is the place to name where no line of the user's was reached.
        """
        self.report(error, step, request_id=request_id)
        if isinstance(error, ServerError):
            return error
        kind = type(error).__name__
        if self.hide_errors:
            return NodeFailure(f"{EXECUTION_ERROR}: {kind}")
        place = self.place(error) or otherwise
        return NodeFailure(f"{EXECUTION_ERROR}: {describe(error)}" + ("" if place is None else f" ({place})"))

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

    def place(self, error: BaseException) -> Place | None:
        """Give the line of the user's that an error comes from: the innermost in the handler's folder."""
        if isinstance(error, SyntaxError) and error.filename is not None and self._is_theirs(error.filename):
            return Place(error.filename, error.lineno or 0)
        places: list[Place] = []
        frames = trimmed(error)
        while frames is not None:
            places.append(Place(frames.tb_frame.f_code.co_filename, frames.tb_lineno))
            frames = frames.tb_next
        theirs = [place for place in places if self._is_theirs(place.file)]
        return theirs[-1] if theirs else places[-1] if places else None

    def _is_theirs(self, file: str) -> bool:
        return Path(file).is_relative_to(self.folder)


def describe(error: BaseException) -> str:
    """Give an error's type and text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(method: Callable[..., Any]) -> Place | None:
    """Give the line where a method is defined."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else Place(code.co_filename, code.co_firstlineno)


def trimmed(error: BaseException) -> TracebackType | None:
    """Give a traceback without the frames of the server and of the import system."""
    kept: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((*_MACHINERY, "<frozen importlib")):
            kept.append(frame)
        frame = frame.tb_next
    result: TracebackType | None = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
