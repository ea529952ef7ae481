"""Where a worker process gets its Op from: it makes the pipeline anew, as the server has made its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.isolation.codec import Encoded
from ovmstrio.ops.executor.channel import Result, Sample
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.observing.hooks import Span, Stage
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.ops.values import CustomExceptionCode

if TYPE_CHECKING:
    from ovmstrio.ops.graph import OpGraph
    from ovmstrio.ops.predictor.protocol import MakePredictor

__all__ = [
    "RECOVER",
    "BatchAnswer",
    "LoadedPipeline",
    "PipelineSource",
    "answer_of",
    "batch_message",
    "batch_of",
    "message_of",
    "sendable",
    "unsendable",
]

RECOVER: Final = "recover"
"""What the server asks a worker process in place of a batch; it is answered when the worker can work again."""


def batch_message(samples: Sequence[Sample], trace: dict[str, str]) -> Any:
    """Give the message of a batch, with what tells of the trace that it is a part of; nothing for none."""
    return [[[one.data_id, one.log_id, dict(one.inputs)] for one in samples], trace]


def batch_of(message: Any) -> tuple[list[Sample], dict[str, str]]:
    """Give the samples of a message, and its trace."""
    rows, trace = message
    return [Sample(*row) for row in rows], trace


@dataclass(slots=True)
class BatchAnswer:
    """What a worker process made of its samples, the stages that it tells of, and whether it must recover now."""

    results: list[Result] = field(default_factory=list)
    stages: list[tuple[Stage, Sequence[int], Span]] = field(default_factory=list)
    is_spoiled: bool = False


def message_of(answer: BatchAnswer) -> Any:
    """Give the message of an answer, which can be sent if every output can."""
    return [[_row(result) for result in answer.results], [list(row) for row in answer.stages], answer.is_spoiled]


def sendable(result: Result) -> Result:
    """Give a result that can be sent: an output that cannot becomes a failure."""
    try:
        Encoded(result.output)
    except TypeError as error:
        return Result(failure=unsendable(error))
    return result


def unsendable(error: TypeError) -> OpFailure:
    """Give the failure of a sample that cannot be sent."""
    return OpFailure(CustomExceptionCode.TYPE_ERROR.value, f"an Op in a process of its own takes and gives {error}")


def _row(result: Result) -> list[Any]:
    failure = result.failure
    fault = None if failure is None else [failure.code, failure.info, failure.is_product]
    return [result.output, fault, result.jumps]


def answer_of(message: Any) -> BatchAnswer:
    """Give the answer of a message.

    Raises:
        ValueError, TypeError: it is none.
    """
    rows, stages, spoiled = message
    spans = [(stage, ids, tuple(span)) for stage, ids, span in stages]
    return BatchAnswer([_result(*row) for row in rows], spans, spoiled)


def _result(output: Any, fault: Any, jumps: Any) -> Result:
    if fault is None:
        return Result(output, jumps=bool(jumps))
    code, info, is_product = fault
    return Result(failure=OpFailure(code, info, is_product=is_product))


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline that has been made: its Ops, what holds for them, and what makes their predictors."""

    graph: OpGraph
    settings: PipelineSettings
    make_predictor: MakePredictor | None = None


@dataclass(frozen=True, slots=True)
class PipelineSource:
    """A function that makes a pipeline in any process.

    Attributes:
        loader: the function, as ``module:name``; it takes the argument and gives a :class:`LoadedPipeline`.
        argument: what it is called with, such as the path of a script.
    """

    loader: str
    argument: str = ""

    def load(self) -> LoadedPipeline:
        """Make the pipeline.

        Raises:
            Exception: whatever the function or its module raises.
        """
        module, _, name = self.loader.partition(":")
        loaded: Any = getattr(importlib.import_module(module), name)(self.argument)
        if not isinstance(loaded, LoadedPipeline):
            raise TypeError(f"{self.loader} should return LoadedPipeline, got {type(loaded).__name__}")
        return loaded
