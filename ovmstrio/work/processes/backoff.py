"""How long to wait before something is started again that does not last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Pauses that double.

    Attributes:
        next_seconds: the first pause, and then the one that is to come.
        longest_seconds: no pause is longer.
        stable_seconds: what has lived longer than that begins again with the first pause.
    """

    next_seconds: float
    longest_seconds: float
    stable_seconds: float = math.inf
    _first_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        """Remember the first pause."""
        self._first_seconds = self.next_seconds

    def seconds_after(self, lived_seconds: float = 0) -> float:
        """Give the pause after something that lived so long."""
        seconds = self._first_seconds if lived_seconds > self.stable_seconds else self.next_seconds
        self.next_seconds = min(2 * seconds, self.longest_seconds)
        return seconds
