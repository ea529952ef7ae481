"""What the server and a worker process tell each other: samples one way, results and times the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ovmstrio.runtimes.ops.codes import CustomExceptionCode
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.processes.codec import Encoded, encode
from ovmstrio.runtimes.ops.executor.samples import Result, Sample
from ovmstrio.runtimes.ops.observing.hooks import Span, Stage

__all__ = [
    "RECOVERED",
    "BatchAnswer",
    "answer_of",
    "encode_answer",
    "encode_samples",
    "is_spoiled",
    "samples_of",
    "unsendable",
]

RECOVERED: Final = "recovered"
"""What a worker process sends once it can work again, if its last answer told that it could not."""


def encode_samples(samples: Sequence[Sample]) -> Encoded:
    """Make samples ready to be sent.

    Raises:
        TypeError: one of them holds what cannot be sent.
    """
    return encode([[sample.data_id, sample.log_id, dict(sample.inputs)] for sample in samples])


def samples_of(message: Any) -> list[Sample]:
    """Give the samples of a message."""
    return [Sample(*row) for row in message]


@dataclass(slots=True)
class BatchAnswer:
    """What a worker process made of its samples, the stages that it tells of, and whether it must recover now."""

    results: list[Result] = field(default_factory=list)
    stages: list[tuple[Stage, Sequence[int], Span]] = field(default_factory=list)
    is_spoiled: bool = False


def encode_answer(answer: BatchAnswer) -> Encoded:
    """Make an answer ready to be sent; an output that cannot be sent becomes a failure."""
    stages = [list(row) for row in answer.stages]
    try:
        return encode([[_row(result) for result in answer.results], stages, answer.is_spoiled])
    except TypeError:
        return encode([[_row(_sendable(result)) for result in answer.results], stages, answer.is_spoiled])


def is_spoiled(message: Any) -> bool:
    """Tell whether a message is an answer after which another message will come."""
    match message:
        case [_, _, True]:
            return True
    return False


def _sendable(result: Result) -> Result:
    try:
        encode(result.output)
    except TypeError as error:
        return Result(failure=unsendable(error))
    return result


def unsendable(error: TypeError) -> OpFailure:
    """Give the failure of a sample that cannot be sent."""
    return OpFailure(CustomExceptionCode.TYPE_ERROR.value, str(error))


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
