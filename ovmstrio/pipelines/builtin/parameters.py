"""The parameters of a built-in node: texts of the configuration, read into values with every problem at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["Parameters"]

_T = TypeVar("_T", int, float)


class Parameters:
    """Reads the parameters of one node, and gathers what is wrong with them.

    A value that has been noted as a problem is replaced by one that can be worked with, so that reading goes on.
    Where a parameter that may be left out is no number, its default is taken, as OVMS does, with a warning.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._asked: set[str] = set()
        self._problems: list[Problem] = []

    # Values

    def integer(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = 2**31 - 1, must_be_odd: bool = False
    ) -> int:
        """Give a whole number; without a default it is required."""
        expected = f"{'an odd' if must_be_odd else 'a whole'} number" + _bounds(low, high)
        value = self._number(name, int, default, expected)
        if value is None:
            return low
        if not low <= value <= high or (must_be_odd and value % 2 == 0):
            return self._replaced(name, expected, low)
        return value

    def number(
        self, name: str, *, default: float | None = None, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """Give a number; without a default it is required."""
        expected = "a number" + _bounds(low, high)
        value = self._number(name, float, default, expected)
        if value is None:
            return 0.0
        return value if low <= value <= high and math.isfinite(value) else self._replaced(name, expected, 0.0)

    def flag(self, name: str) -> bool:
        """Give a truth value, which is false unless it is written ``true``."""
        text = self._text(name)
        if text not in (None, "true", "false"):
            self._warn(name, "true or false", "it is taken for false")
        return text == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Give one of some words; without a default it is required."""
        text = self._text(name)
        if text is None and default is not None:
            return default
        if text not in choices:
            self.refuse(name, " or ".join(choices))
            return choices[0]
        return text

    def numbers(self, name: str) -> tuple[float, ...]:
        """Give the numbers of a list such as ``[1,2.5]``; none where it is not given."""
        text = self._text(name)
        if text is None:
            return ()
        inner = text.strip()
        if inner.startswith("[") and inner.endswith("]"):
            values = [_parsed(part, float) for part in inner[1:-1].split(",")]
            if all(value is not None and math.isfinite(value) for value in values):
                return tuple(value for value in values if value is not None)
        self.refuse(name, "a list of numbers, such as [123.68,116.78,103.94]")
        return ()

    def is_given(self, name: str) -> bool:
        """Tell whether a parameter is configured."""
        return name in self._given

    # Problems

    def refuse(self, name: str, expected: str, message: str = "the parameter cannot be used") -> None:
        """Note that a parameter cannot be used as it is, or is missing."""
        if name not in self._given:
            message, fix = "the parameter is missing", f'add "{name}" to the params of the node'
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, suggestion=fix))
        else:
            found = repr(self._given[name])
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, found=found))

    def finish(self) -> tuple[Problem, ...]:
        """Give the warnings, once everything has been read.

        Raises:
            ConfigError: a parameter is missing or cannot be used; all are listed.
        """
        for name in sorted(self._given.keys() - self._asked):
            fix = did_you_mean(name, self._asked, otherwise=f"known are {', '.join(sorted(self._asked))}")
            message = "the node has no such parameter"
            self._problems.append(Problem(message, path=f"params.{name}", suggestion=fix, severity="warning"))
        if any(problem.severity == "error" for problem in self._problems):
            raise ConfigError(self._problems)
        return tuple(self._problems)

    # How it is done

    def _text(self, name: str) -> str | None:
        self._asked.add(name)
        return self._given.get(name)

    def _number(self, name: str, kind: Callable[[str], _T], default: _T | None, expected: str) -> _T | None:
        """Give what is written, or the default; None has been noted as a problem."""
        text = self._text(name)
        value = None if text is None else _parsed(text, kind)
        if value is not None:
            return value
        if default is None:
            self.refuse(name, expected)
        elif text is not None:
            self._warn(name, expected, f"the default {default} is taken")
        return default

    def _warn(self, name: str, expected: str, message: str) -> None:
        self._problems.append(
            Problem(
                message, path=f"params.{name}", expected=expected, found=repr(self._given[name]), severity="warning"
            )
        )

    def _replaced(self, name: str, expected: str, value: _T) -> _T:
        self.refuse(name, expected)
        return value


def _parsed(text: str, kind: Callable[[str], _T]) -> _T | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _bounds(low: float, high: float) -> str:
    if math.isinf(low):
        return ""
    return f" from {low} on" if high >= 2**31 - 1 else f" from {low} to {high}"
