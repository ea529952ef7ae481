"""Source from which worker processes load their pipeline, and the messages between server and worker process."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.isolation.messages import Encoded
from ovmstrio.ops.executor.channel import Result, Sample
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.messages import CustomExceptionCode
from ovmstrio.ops.observing.hooks import Span, Stage
from ovmstrio.ops.settings import PipelineSettings

if TYPE_CHECKING:
    from ovmstrio.ops.graph import OpGraph
    from ovmstrio.ops.predictor.protocol import CreatePredictor

RECOVER: Final = "recover"
"""Request in place of a batch: the worker process answers when it can work again."""


def encode_batch(samples: Sequence[Sample], trace: dict[str, str]) -> Any:
    """Return the message of a batch; ``trace`` holds trace headers, empty for none."""
    return [[[one.data_id, one.log_id, dict(one.inputs)] for one in samples], trace]


def decode_batch(message: Any) -> tuple[list[Sample], dict[str, str]]:
    """Return the samples and the trace headers of a message."""
    rows, trace = message
    return [Sample(*row) for row in rows], trace


@dataclass(slots=True)
class BatchReply:
    """Answer of a worker process: results, stages, and whether the worker must recover."""

    results: list[Result] = field(default_factory=list)
    stages: list[tuple[Stage, Sequence[int], Span]] = field(default_factory=list)
    needs_recovery: bool = False


def encode_reply(answer: BatchReply) -> Any:
    """Return the message of an answer; it can be sent if every output can be encoded."""
    return [[_row(result) for result in answer.results], [list(row) for row in answer.stages], answer.needs_recovery]


def ensure_sendable(result: Result) -> Result:
    """Return the result, or a failure if its output cannot be encoded."""
    try:
        Encoded(result.output)
    except TypeError as error:
        return Result(failure=unsendable_failure(error))
    return result


def unsendable_failure(error: TypeError) -> OpFailure:
    """Return the failure of a sample that cannot be encoded."""
    return OpFailure(CustomExceptionCode.TYPE_ERROR.value, f"an Op in a worker process takes and returns {error}")


def _row(result: Result) -> list[Any]:
    failure = result.failure
    fault = None if failure is None else [failure.code, failure.info, failure.is_product, failure.user_type]
    return [result.output, fault, result.jumps]


def decode_reply(message: Any) -> BatchReply:
    """Parse an answer; raises ValueError or TypeError if malformed."""
    rows, stages, spoiled = message
    spans = [(stage, ids, tuple(span)) for stage, ids, span in stages]
    return BatchReply([_result(*row) for row in rows], spans, spoiled)


def _result(output: Any, fault: Any, jumps: Any) -> Result:
    if fault is None:
        return Result(output, jumps=bool(jumps))
    code, info, is_product, user_type = fault
    failure = OpFailure(code, info, is_product=is_product)
    failure.user_type = user_type
    return Result(failure=failure)


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """Pipeline definition: Ops, settings and predictor factory."""

    graph: OpGraph
    settings: PipelineSettings
    make_predictor: CreatePredictor | None = None


@dataclass(frozen=True, slots=True)
class PipelineSource:
    """Function ``loader`` as ``module:name``, and its argument, from which any process can load the pipeline."""

    loader: str
    argument: str = ""

    def load(self) -> LoadedPipeline:
        """Load the pipeline; any exception of the function propagates."""
        module, _, name = self.loader.partition(":")
        loaded: Any = getattr(importlib.import_module(module), name)(self.argument)
        if not isinstance(loaded, LoadedPipeline):
            raise TypeError(f"{self.loader} should return LoadedPipeline, got {type(loaded).__name__}")
        return loaded
