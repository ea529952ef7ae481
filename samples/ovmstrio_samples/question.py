"""Calls of models, as the samples' clients make them and the demo and the tests do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ovmstrio import Array

__all__ = ["Arrays", "Ask", "Question"]

Arrays = Mapping[str, Array]

Ask = Callable[[str, Arrays], Arrays]
"""Calls the model of that name with these inputs and gives its outputs."""


@dataclass(frozen=True, slots=True)
class Question:
    """One call whose right answer is known.

    ``subject`` says to people what is asked about; ``read`` turns the outputs into an answer in words, which is right
    when it equals ``expected``.  With nothing expected, any answer is right.
    """

    model: str
    subject: str
    inputs: Arrays
    expected: str
    read: Callable[[Arrays], str]

    def is_right(self, answer: str) -> bool:
        """Tell whether ``answer`` is the one that was expected."""
        return self.expected in {"", answer}
