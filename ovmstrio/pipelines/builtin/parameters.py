"""Parser of the parameters of built-in nodes; collects all problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from ovmstrio.config.documents import did_you_mean
from ovmstrio.core.errors import ConfigError, Problem

_T = TypeVar("_T", int, float)


class Parameters:
    """Parameters of one node.

    An invalid value is reported and replaced by a valid one, so that parsing continues. As in OVMS, an optional
    parameter that is not a number falls back to its default, with a warning.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    # Values

    def integer(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = 2**31 - 1, must_be_odd: bool = False
    ) -> int:
        """Return an integer; required without a default."""
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
        """Return a number; required without a default."""
        expected = "a number" + _bounds(low, high)
        value = self._number(name, float, default, expected)
        if value is None:
            return 0.0
        return value if low <= value <= high and math.isfinite(value) else self._replaced(name, expected, 0.0)

    def flag(self, name: str) -> bool:
        """Return a boolean; anything but ``true`` is false."""
        text = self._text(name)
        if text not in (None, "true", "false"):
            self._warn(name, "true or false", "false is used")
        return text == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of the choices; required without a default."""
        text = self._text(name)
        if text is None and default is not None:
            return default
        if text not in choices:
            self.refuse(name, " or ".join(choices))
            return choices[0]
        return text

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list such as ``[1,2.5]``; empty if the parameter is missing."""
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
        """Return whether a parameter is configured."""
        return name in self._given

    # Problems

    def refuse(self, name: str, expected: str, message: str = "invalid parameter") -> None:
        """Report an invalid or missing parameter."""
        if name not in self._given:
            message, fix = "the parameter is missing", f'add "{name}" to the params of the node'
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, suggestion=fix))
        else:
            found = repr(self._given[name])
            self._problems.append(Problem(message, path=f"params.{name}", expected=expected, found=found))

    def finish(self) -> tuple[Problem, ...]:
        """Return the warnings, once all parameters have been read."""
        for name in sorted(self._given.keys() - self._known):
            fix = did_you_mean(name, self._known, otherwise=f"known: {', '.join(sorted(self._known))}")
            message = "unknown parameter"
            self._problems.append(Problem(message, path=f"params.{name}", suggestion=fix, severity="warning"))
        if any(problem.severity == "error" for problem in self._problems):
            raise ConfigError(self._problems)
        return tuple(self._problems)

    # Helpers

    def _text(self, name: str) -> str | None:
        self._known.add(name)
        return self._given.get(name)

    def _number(self, name: str, kind: Callable[[str], _T], default: _T | None, expected: str) -> _T | None:
        """Return the value or the default; None if an error was reported."""
        text = self._text(name)
        value = None if text is None else _parsed(text, kind)
        if value is not None:
            return value
        if default is None:
            self.refuse(name, expected)
        elif text is not None:
            self._warn(name, expected, f"the default {default} is used")
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
