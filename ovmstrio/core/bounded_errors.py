"""Errors small enough to be written down, whatever was raised: texts, notes, frames and chains have bounds.

What is small is given as it is.  Of what is not a likeness is made that looks the same in a traceback: classes of the
same names, texts that are cut, the first frames and the last ones.  So whoever writes errors need not know of bounds.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from types import TracebackType
from typing import Any, Final

from ovmstrio.core.texts import MOST_CAUSES, MOST_CHARACTERS, causes_of, cut, is_plain, text_of

__all__ = ["ExceptionInfo", "bounded", "bounded_info", "format_error"]

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_MOST_FRAMES: Final = 50
_MOST_NOTES: Final = 10
_EARLIER: Final = "errors that came before this one are left out"
_FURTHER: Final = "further errors are left out"


def bounded(error: BaseException) -> BaseException:
    """Give an error that can be written down in a bounded time: itself, or a likeness.

    Of a chain the last :data:`MOST_CAUSES` errors are told, with those in groups counted; of each text and note
    :data:`MOST_CHARACTERS`, of the frames of each the first 25 and the last.
    """
    members = list(islice(_members(error), MOST_CAUSES + 1))
    if len(members) <= MOST_CAUSES and all(map(_is_small, members)):
        return error
    return _Likenesses().of(error)


def bounded_info(info: ExceptionInfo) -> ExceptionInfo:
    """Do the same for what ``sys.exc_info`` gives, whose traceback need not be that of the error."""
    error = bounded(info[1])
    return type(error), error, _bounded_frames(info[2])


def format_error(error: BaseException) -> str:
    """Give an error with its traceback and what it came from, as Python writes it, in a bounded time."""
    return "".join(traceback.format_exception(*bounded_info((type(error), error, error.__traceback__))))


def _members(error: BaseException) -> Iterator[BaseException]:
    """Give the errors of a chain, and those of the groups in it with their chains."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        for each in causes_of(waiting.pop()):
            if id(each) in seen:
                break
            seen.add(id(each))
            yield each
            if isinstance(each, BaseExceptionGroup):
                waiting.extend(each.exceptions[: MOST_CAUSES + 1])


def _is_small(error: BaseException) -> bool:
    notes = _notes_of(error)
    return (
        (is_plain(error) or _tells_shortly(error))
        and len(notes) <= _MOST_NOTES
        and all(isinstance(note, str) and len(note) <= MOST_CHARACTERS for note in notes)
        and not any(islice(_frames(error.__traceback__), _MOST_FRAMES, None))
    )


def _tells_shortly(error: BaseException) -> bool:
    """Tell so of errors of Python's own that make their texts themselves, as those of files and of groups."""
    is_pythons_own = type(error).__str__.__class__ is type(BaseException.__str__)
    is_made_of_short = is_pythons_own and type(error).__str__ not in {BaseException.__str__, KeyError.__str__}
    quoted = (getattr(error, "filename", None), getattr(error, "text", None), text_of(error))
    return is_made_of_short and all(not isinstance(each, str) or len(each) <= MOST_CHARACTERS for each in quoted)


def _notes_of(error: BaseException) -> Sequence[Any]:
    notes = getattr(error, "__notes__", ())
    return notes if isinstance(notes, (list, tuple)) else (notes,)


def _frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _bounded_frames(first: TracebackType | None) -> TracebackType | None:
    frames = list(_frames(first))
    if len(frames) <= _MOST_FRAMES:
        return first
    half = _MOST_FRAMES // 2
    result: TracebackType | None = None
    for each in chain(reversed(frames[-half:]), reversed(frames[:half])):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


class _Likenesses:
    """Makes likenesses of as many errors as may be told."""

    def __init__(self) -> None:
        self._left = MOST_CAUSES
        self._seen: set[int] = set()

    def of(self, error: BaseException) -> BaseException:
        """Make the likeness of an error with what it came from."""
        first = last = self._of_one(error)
        for each in islice(causes_of(error), 1, None):
            if not self._left or id(each) in self._seen:
                last.add_note(_EARLIER)
                break
            likeness = self._of_one(each)
            if last.__suppress_context__:
                last.__cause__ = likeness
            else:
                last.__context__ = likeness
            last = likeness
        return first

    def _of_one(self, error: BaseException) -> BaseException:
        self._seen.add(id(error))
        self._left = max(0, self._left - 1)
        likeness = self._of_group(error) if isinstance(error, BaseExceptionGroup) else _of_text(error)
        # To be written as what it was raised from is written.
        likeness.__suppress_context__ = error.__cause__ is not None or error.__suppress_context__
        for note in islice(_notes_of(error), _MOST_NOTES):
            likeness.add_note(cut(note if isinstance(note, str) else type(note).__name__))
        if len(_notes_of(error)) > _MOST_NOTES:
            likeness.add_note(f"{len(_notes_of(error)) - _MOST_NOTES} notes are left out")
        likeness.__traceback__ = _bounded_frames(error.__traceback__)
        return likeness

    def _of_group(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        members: list[BaseException] = []
        for each in group.exceptions:
            if not self._left:
                break
            if id(each) not in self._seen:
                members.append(self.of(each))
        if len(members) < len(group.exceptions):
            members.append(_Likeness(_FURTHER))
        kind = _class_like(_GroupLikeness, type(group).__module__, type(group).__qualname__)
        likeness: BaseException = kind(cut(group.message), members)
        return likeness


def _of_text(error: BaseException) -> BaseException:
    likeness: BaseException = _class_like(_Likeness, type(error).__module__, type(error).__qualname__)(text_of(error))
    return likeness


class _Likeness(Exception):
    """Stands for an error."""


class _GroupLikeness(BaseExceptionGroup[BaseException]):
    """Stands for a group of errors."""


@lru_cache(maxsize=256)
def _class_like(base: type[BaseException], module: str, name: str) -> type[Any]:
    """Make a class that is called like another one."""
    made = type(name.rpartition(".")[2], (base,), {"__module__": module})
    made.__qualname__ = name
    return made
