"""What was found wrong in one file, gathered until all of it can be told at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, Literal

from ovmstrio.config.located import NO_LINE, Document, Located
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["Findings", "Severity", "by_line", "did_you_mean", "shown", "suggest_key", "wrong"]

Severity = Literal["error", "warning"]

_SHOWN_CHARACTERS: Final = 80
_MAX_WORD_CHARACTERS: Final = 200
"""Longer words are close to no known one, and comparing takes time that grows with their length."""


def shown(value: Any) -> str:
    """Give a value as JSON, cut to a length that fits a message."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 4] + " ..."


def did_you_mean(found: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Suggest the known word that the found one is close to, or else what ``otherwise`` says."""
    close = get_close_matches(found, list(known), 1, 0.6) if len(found) <= _MAX_WORD_CHARACTERS else ()
    return f"did you mean {close[0]!r}?" if close else otherwise


def suggest_key(found: Any, known: Iterable[str]) -> str:
    """Suggest what a key was meant to be: a known one that is close to it, or any."""
    known = list(known)
    return did_you_mean(str(found), known, otherwise=f"known are {', '.join(known)}")


def wrong(
    option: str, found: Any, expected: str, *, message: str = "", suggestion: str = "", severity: Severity = "error"
) -> ConfigError:
    """Make the error of one option's value; ``option`` may lead on to a part of it (``shape.input``)."""
    problem = Problem(
        message or "the value cannot be used",
        path=option,
        expected=expected,
        found=shown(found),
        suggestion=suggestion,
        severity=severity,
    )
    return ConfigError([problem])


@dataclass(slots=True)
class Findings:
    """The problems of one file.

    ``fatal`` make the file unusable as a whole; ``problems`` are the others, warnings included.
    """

    file: str
    fatal: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, node: Located, message: str, *, expected: str = "", found: str = "", suggestion: str = "") -> None:
        """Note a problem for which the file as a whole cannot be used."""
        self.fatal.append(Problem(message, self.file, _line(node), node.path, expected, found, suggestion))

    def refuse_repeated(self, document: Document, whose: str = " in one object") -> None:
        """Note every key that its object had already."""
        for node in document.repeated:
            self.refuse(node, f"the key is given twice{whose}", suggestion="remove one of them")

    def warn(self, node: Located, message: str, suggestion: str = "") -> None:
        """Note something that is passed over."""
        self.problems.append(
            Problem(message, self.file, _line(node), node.path, suggestion=suggestion, severity="warning")
        )

    def place(self, node: Located, problem: Problem) -> Problem:
        """Give a problem of a part of ``node`` its place: its path leads on from there, as far as the file goes."""
        at = node.find(*problem.path.split("."))
        return replace(problem, file=self.file, line=_line(at), path=at.path)

    @property
    def all(self) -> tuple[Problem, ...]:
        """Everything that was noted, by line."""
        return by_line([*self.fatal, *self.problems])


def by_line(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Order problems of one file."""
    return tuple(sorted(problems, key=lambda problem: problem.line or 0))


def _line(node: Located) -> int | None:
    return None if node.line == NO_LINE else node.line
