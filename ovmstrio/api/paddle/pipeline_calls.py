"""What every way into a pipeline calls: the service's name is checked, and nothing but an answer comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import structlog

from ovmstrio.runtimes.ops.values import CustomExceptionCode, PipelineResponse

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.values import PipelineRequest

__all__ = ["PipelineCalls", "Running"]

log = structlog.get_logger(__name__)

WRONG_NAME: Final = "Failed to inference: Service name error."
CLOSED: Final = "dag closed."


class Running(Protocol):
    """A pipeline that runs; an executor is one."""

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request; never raises anything but cancellation."""
        ...


class PipelineCalls:
    """The calls of one pipeline.

    Args:
        name: under which the service answers; None for one without a name, which answers only nameless requests.
        executor: runs the Ops.
    """

    def __init__(self, name: str | None, executor: Running) -> None:
        self.name = name
        self._executor = executor
        self._closed = False

    def close(self) -> None:
        """Answer every later request with 3001; those that are under way are the executor's."""
        self._closed = True

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request, whatever comes of it.

        Raises: nothing but cancellation.

        Cancellation: at any checkpoint; the executor gives back what the request held.
        """
        if request.name and request.name != self.name:
            log.error("service name error", log_id=request.logid, asked=request.name[:80], name=self.name)
            return PipelineResponse(CustomExceptionCode.NO_SERVICE.value, WRONG_NAME)
        if self._closed:
            return PipelineResponse(CustomExceptionCode.CLOSED_ERROR.value, CLOSED)
        return await self._executor.infer(request, deadline)
