"""What was seen of the stacks of threads, as values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["SampledThreads", "StackFrame"]


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A function and where it begins."""

    name: str
    file: str
    line: int


@dataclass(slots=True)
class SampledThreads:
    """What was seen of threads that do the same.

    Attributes:
        name: what they do.
        samples: how often one was seen.
        waiting: how often one waited for something to do.
        cpu_seconds: how long they had a processor; None where the system does not tell.
        stacks: how often each stack was seen in which it did not wait, outermost frame first.
        process: the number of the worker process that they are of; 0 for the server itself.
        service: for which that process works.
    """

    name: str
    samples: int = 0
    waiting: int = 0
    cpu_seconds: float | None = None
    stacks: Counter[tuple[StackFrame, ...]] = field(default_factory=Counter)
    process: int = 0
    service: str = ""
