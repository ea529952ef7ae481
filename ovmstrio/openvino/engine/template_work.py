"""Bounds on what a chat template may do, counted and never timed, so that one that loops ends alike everywhere."""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Any, Final

__all__ = ["TooMuchWork", "Work"]

_STEPS: Final = 20_000
_STEPS_FOR_VALUE: Final = 100
_LETTERS: Final = 4_000_000
_LETTERS_FOR_LETTER: Final = 64
_LETTERS_FOR_VALUE: Final = 1000
_READ_FOR_ONE: Final = 16
_MOST: Final = 100_000
_MOST_BITS: Final = 4096
_WIDTH: Final = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")


class TooMuchWork(Exception):
    """A template went beyond its bounds; the text says which."""


class Work:
    """What one rendering has left of its bounds, which grow with what it is given.

    Args:
        values: how many values the conversation and its tools have, nested ones included.
        letters: how long their texts are together.
    """

    def __init__(self, values: int, letters: int) -> None:
        self._steps = _STEPS + _STEPS_FOR_VALUE * values
        self._letters = _LETTERS + _LETTERS_FOR_LETTER * letters + _LETTERS_FOR_VALUE * values

    def step(self, letters: int) -> str:
        """Count a turn of a loop or a call of a macro, whose own text has so many letters.

        Raises:
            TooMuchWork: there were too many.
        """
        self._steps -= 1
        if self._steps < 0:
            raise TooMuchWork("it loops for too long")
        self.room(letters)
        return ""

    def room(self, size: int) -> None:
        """Count so many letters or items that are made.

        Raises:
            TooMuchWork: they are too many.
        """
        self._letters -= max(size, 0)
        if self._letters < 0:
            raise TooMuchWork("what it makes is too large")

    def made(self, value: Any) -> Any:
        """Count what was made, and give it.

        Raises:
            TooMuchWork: it is too large, with all that was made before.
        """
        if isinstance(value, str | list | tuple | dict):
            self.room(len(value))
        return value

    def operator(self, operator: str, left: Any, right: Any) -> None:
        """Refuse what would be too large before it is made.

        Raises:
            TooMuchWork: it would.
        """
        if operator == "%" and isinstance(left, str):
            self._formatted(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TooMuchWork("it computes with numbers that are too large")
        elif operator == "*":
            self.room(_size(left) * _size(right))

    def call(self, name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a filter, or a method of a text, whose result may be beyond the bounds; count what it reads.

        Raises:
            TooMuchWork: it may.
        """
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > _MOST:
                raise TooMuchWork(f"it asks for {argument} of something, where {_MOST} are the most")
        if name == "join" and arguments:
            self.room(_size(subject) * _size(arguments[0]))
        if not isinstance(subject, str):
            return
        self.room(len(subject) // _READ_FOR_ONE)
        if name in {"format", "format_map"}:
            self._formatted(subject)
        elif name == "indent":
            self.room((subject.count("\n") + 1) * max((_size(argument) for argument in arguments), default=0))
        elif name == "translate":
            raise TooMuchWork("it translates letters, which has no bound")
        elif name == "replace" and len(arguments) > 1 and isinstance(arguments[0], str):
            self.room(subject.count(arguments[0]) * _size(arguments[1]))

    @staticmethod
    def _formatted(text: str) -> None:
        if _WIDTH.search(text):
            raise TooMuchWork("it formats with a width that has no bound")


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1
