"""One sample on its way through one Op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.observing.hooks import Span, Stage

__all__ = ["ReportStage", "Result", "Sample", "Worker"]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What an Op gets of one request: its numbers, and the outputs of the Op's inputs by their names."""

    data_id: int
    log_id: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What an Op made of a sample: its output or its failure, and whether that output jumps."""

    output: dict[str, Any] | None = None
    failure: OpFailure | None = None
    jumps: bool = False


ReportStage = Callable[[Stage, Sequence[int], Span], None]
"""Is told of a stage, the data ids that it concerned, and when it began and ended."""


class Worker(Protocol):
    """Works on one batch at a time, with a copy of the Op of its own.

    Attributes:
        index: its number among the workers of the Op.
    """

    index: int

    @property
    def is_spoiled(self) -> bool:
        """Whether it must recover before it can work again."""
        ...

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Work on samples, and give the result of each.

        Ownership: the samples until it returns.

        Cancellation: at once; the worker may be spoiled then.
        """
        ...

    async def recover(self) -> None:
        """Make the worker fit for work again.

        Raises:
            ConfigError: it cannot be started again.

        Cancellation: at once.
        """
        ...
