"""Where in a user's code an error comes from, and how it is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import trio

import pyovms
from ovmstrio.core.texts import text_of

__all__ = ["SourceLine", "at_place", "describe", "missing_module_fix", "place_in", "place_of", "trimmed"]

_MACHINERY: Final = (
    f"{Path(__file__).parents[2]}/",
    *(f"{Path(module.__file__).parent}/" for module in (trio, pyovms) if module.__file__ is not None),
)


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def describe(error: BaseException) -> str:
    """Give an error's type and text, cut."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_place(text: str, place: SourceLine | None) -> str:
    """Put a place behind a text, if there is one."""
    return text if place is None else f"{text} ({place})"


def missing_module_fix(error: BaseException) -> str:
    """Tell what to do about an import of a module that is not there; empty for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        return f"install what brings {top!r}, or put {top}.py beside the handler"
    return ""


def place_of(method: Callable[..., Any]) -> SourceLine | None:
    """Give the line where a method is defined."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno)


def place_in(folder: Path, error: BaseException) -> SourceLine | None:
    """Give the line of the user's that an error comes from: the innermost in the folder of the user's code."""
    if isinstance(error, SyntaxError) and error.filename is not None and _is_in(folder, error.filename):
        return SourceLine(error.filename, error.lineno or 0)
    places: list[SourceLine] = []
    frames = trimmed(error)
    while frames is not None:
        places.append(SourceLine(frames.tb_frame.f_code.co_filename, frames.tb_lineno))
        frames = frames.tb_next
    theirs = [place for place in places if _is_in(folder, place.file)]
    return theirs[-1] if theirs else places[-1] if places else None


def _is_in(folder: Path, file: str) -> bool:
    return Path(file).is_relative_to(folder)


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
