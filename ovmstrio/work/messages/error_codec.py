"""Errors as plain data and back: whoever gets one from another process can treat it as if it had been raised here.

An error keeps its class where both ends have that: those of Python and of the server.  Any other becomes one of a class
of the same name, derived from the nearest one that both have: so an error of a user's own that is derived from one of
the server's keeps its status.  Text, attributes, causes and the lines of the traceback come along.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

from ovmstrio.core.texts import MOST_CAUSES, MOST_CHARACTERS, cut, text_of

__all__ = ["decode_error", "encode_error"]

_MOST_FRAMES: Final = 25
_SHARED_PACKAGES: Final = frozenset({"ovmstrio", "pyovms", "cortex_internal"})
_ATTRIBUTES: Final = ("name", "path", "msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset")
"""What errors of Python's own keep outside of their dictionaries."""

_PROBLEM: Final = "problem"


def encode_error(error: BaseException, depth: int = MOST_CAUSES) -> dict[str, Any]:
    """Make plain data of an error and of up to ``depth`` others that it came from."""
    members = _members(error)
    text = str(error.message)[:MOST_CHARACTERS] if members else text_of(error)  # type: ignore[attr-defined]  # a group has one
    arguments = [one for one in map(_plain, error.args) if one is not _NOT_PLAIN]
    return {
        "classes": [[each.__module__, each.__qualname__] for each in type(error).__mro__],
        "text": text,
        "arguments": arguments if len(arguments) == len(error.args) else [text],
        "attributes": dict(_attributes(error)),
        "frames": _frames(error.__traceback__),
        "is_alone": error.__suppress_context__,
        "notes": [cut(str(note)) for note in getattr(error, "__notes__", [])[:MOST_CAUSES]],
        "cause": _encoded(error.__cause__, depth),
        "context": None if error.__suppress_context__ else _encoded(error.__context__, depth),
        "members": [encode_error(one, depth - 1) for one in members] if depth else [],
    }


def _encoded(error: BaseException | None, depth: int) -> dict[str, Any] | None:
    return None if error is None or depth <= 0 else encode_error(error, depth - 1)


def _members(error: BaseException) -> list[BaseException]:
    """Give the errors of a group."""
    if all(each.__name__ != "BaseExceptionGroup" for each in type(error).__mro__):
        return []
    return list(getattr(error, "exceptions", ()))[:MOST_CAUSES]


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    own: dict[str, Any] = dict(getattr(error, "__dict__", {}))
    found = {name: getattr(error, name, None) for name in _ATTRIBUTES if name not in own}
    for name, value in {**own, **{name: one for name, one in found.items() if one is not None}}.items():
        plain = _plain(value)
        if not name.startswith("__") and plain is not _NOT_PLAIN:
            yield name, plain


_NOT_PLAIN: Final = object()


def _plain(value: Any) -> Any:
    """Give what can be sent of a value: itself if it is plain and not too large."""
    if value is None or type(value) in {bool, int, float}:
        return value
    if type(value) in {str, bytes}:
        return value[:MOST_CHARACTERS]
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_FRAMES:
        members = [_plain(one) for one in value]
        return _NOT_PLAIN if any(one is _NOT_PLAIN for one in members) else type(value)(members)
    if is_dataclass(value) and type(value).__module__ == "ovmstrio.core.errors":
        return {_PROBLEM: asdict(value)}  # type: ignore[arg-type]  # no class is an argument of an error
    return _NOT_PLAIN


def _frames(traceback: TracebackType | None) -> list[list[Any]]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append([code.co_filename, traceback.tb_lineno, code.co_name])
        traceback = traceback.tb_next
    return frames if len(frames) <= 2 * _MOST_FRAMES else frames[:_MOST_FRAMES] + frames[-_MOST_FRAMES:]


def decode_error(data: dict[str, Any]) -> BaseException:
    """Make an error of what :func:`encode_error` gave.

    Raises:
        ValueError, LookupError, TypeError: it is not what that gives.
    """
    if data["members"]:
        error: BaseException = BaseExceptionGroup(data["text"], [decode_error(one) for one in data["members"]])
    else:
        error = _made(data["classes"], data["text"], tuple(map(_unpacked, data["arguments"])))
    for name, value in data["attributes"].items():
        try:
            setattr(error, name, _unpacked(value))
        except (AttributeError, TypeError):
            continue
    for note in data["notes"]:
        error.add_note(note)
    error.__cause__ = None if data["cause"] is None else decode_error(data["cause"])
    error.__context__ = error.__cause__ if data["context"] is None else decode_error(data["context"])
    error.__suppress_context__ = bool(data["is_alone"])
    return error.with_traceback(_traceback(data["frames"]))


def _unpacked(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unpacked, value))
    if isinstance(value, dict) and _PROBLEM in value:
        return sys.modules["ovmstrio.core.errors"].Problem(**value[_PROBLEM])
    return value


def _made(classes: list[list[str]], text: str, arguments: tuple[Any, ...]) -> BaseException:
    """Make an error of the first class, or of one of its name under the nearest class that is known here."""
    module, name = classes[0]
    known = _known(module, name)
    if known is not None:
        # What is Python's own takes its arguments apart when it is initialized; others may want different ones.
        with suppress(Exception):
            return known(*arguments) if module == "builtins" else known.__new__(known, *arguments)
    base = next(found for found in (_known(*each) for each in classes[known is not None :]) if found is not None)
    made = type(name.rpartition(".")[2], (base,), {"__module__": module, "__str__": lambda _: text})
    return base.__new__(made, *arguments)


def _known(module: str, name: str) -> type[BaseException] | None:
    """Find a class of errors that both ends have; nothing is imported for it."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] in _SHARED_PACKAGES:
        found = getattr(sys.modules.get(module), name, None)
    else:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _here() -> Any:
    """Give a frame."""
    return sys._getframe()  # noqa: SLF001 - frames can only be had from Python itself


_FRAME: Final[CodeType] = _here.__code__


def _traceback(frames: list[list[Any]]) -> TracebackType | None:
    """Make a traceback that names these lines."""
    made: TracebackType | None = None
    for file, line, name in reversed(frames):
        code = _FRAME.replace(co_filename=str(file), co_name=str(name))
        frame = FunctionType(code, {"sys": sys, "__name__": "", "__file__": file})()
        # Without a place in the code, nobody looks for the columns there.
        made = TracebackType(made, frame, -1, int(line))
    return made
