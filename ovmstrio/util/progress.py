"""Progress of steps that take long, such as downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a step, the bytes done so far, and the total bytes (None while unknown).

It is called in the thread of the step: at the beginning, and then after each chunk.
"""


def no_progress(_name: str, _done: int, _total: int | None) -> None:
    """Ignore progress."""
