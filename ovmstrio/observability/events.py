"""The one place where requests are observed, whatever protocol they came by.

The data plane tells each observer when a request starts and how it ended; metrics and the request log are observers,
and tracing can join as one more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Literal, Protocol

__all__ = ["CANCELLED", "OK", "Interface", "Method", "RequestEvent", "RequestObserver"]

Interface = Literal["gRPC", "REST"]
Method = Literal["ModelInfer", "ModelInferStream", "ModelMetadata", "ModelReady"]

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
