"""The one place where requests are observed, whatever protocol they came by.

The data plane tells each observer when a request starts and how it ended; metrics and the request log are observers,
and tracing can join as one more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "API_OF",
    "CANCELLED",
    "INFER",
    "METADATA",
    "OK",
    "Api",
    "Interface",
    "Method",
    "RequestEvent",
    "RequestObserver",
]

Interface = Literal["gRPC", "REST"]
Api = Literal["KServe", "TensorFlowServing"]
Method = Literal[
    "ModelInfer",
    "ModelInferStream",
    "ModelMetadata",
    "ModelReady",
    "Predict",
    "GetModelMetadata",
    "GetModelStatus",
]

API_OF: Final[Mapping[Method, Api]] = {
    "ModelInfer": "KServe",
    "ModelInferStream": "KServe",
    "ModelMetadata": "KServe",
    "ModelReady": "KServe",
    "Predict": "TensorFlowServing",
    "GetModelMetadata": "TensorFlowServing",
    "GetModelStatus": "TensorFlowServing",
}
"""Whose method each one is; no two APIs have one of the same name."""

INFER: Final[Mapping[Api, Method]] = {"KServe": "ModelInfer", "TensorFlowServing": "Predict"}
"""What each API calls one inference."""

METADATA: Final[Mapping[Api, Method]] = {"KServe": "ModelMetadata", "TensorFlowServing": "GetModelMetadata"}
"""What each API calls the question for inputs and outputs."""

OK: Final = "OK"
CANCELLED: Final = "Cancelled"


@dataclass(slots=True)
class RequestEvent:
    """One request to a servable that exists.

    ``version`` is the number that serves it, empty for methods that are about no version.  ``started`` is on the
    clock of ``time.perf_counter``.
    """

    name: str
    version: str
    method: Method
    interface: Interface
    request_id: str = ""
    started: float = field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        """How long the request has taken so far."""
        return perf_counter() - self.started


class RequestObserver(Protocol):
    """Someone who is told of every request; its methods must neither block nor raise."""

    def request_started(self, event: RequestEvent) -> None:
        """A request has found its servable."""
        ...

    def request_finished(self, event: RequestEvent, code: str, error: BaseException | None) -> None:
        """A request has ended.

        ``code`` is :data:`OK`, :data:`CANCELLED` or the name of the error's class.
        """
        ...
