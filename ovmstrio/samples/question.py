"""Calls with known answers, for the samples' clients, the demo and the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ovmstrio import Array

__all__ = ["Arrays", "Ask", "Question"]

Arrays = Mapping[str, Array]

Ask = Callable[[str, Arrays], Arrays]
"""Calls the named model with the inputs and returns its outputs."""


@dataclass(frozen=True, slots=True)
class Question:
    """A call with a known answer.

    ``subject`` describes the input to people.  ``read`` converts the outputs to a text, which is right if it equals
    ``expected``.  If ``expected`` is empty, any answer is right.
    """

    model: str
    subject: str
    inputs: Arrays
    expected: str
    read: Callable[[Arrays], str]

    def is_right(self, answer: str) -> bool:
        """Return whether ``answer`` is the expected one."""
        return self.expected in {"", answer}
