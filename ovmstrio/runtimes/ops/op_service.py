"""A pipeline of Ops as the server has it: called by KServe v2 and by Paddle Serving's own protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from ovmstrio.core.request import ServableMetadata
from ovmstrio.runtimes.ops.kserve_values import infer_response, pipeline_request
from ovmstrio.runtimes.ops.observing.figures import PIPELINE
from ovmstrio.runtimes.ops.values import CustomExceptionCode, PipelineResponse
from ovmstrio.runtimes.resident import ResidentService

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
    from ovmstrio.runtimes.ops.values import PipelineRequest

__all__ = ["NAMELESS", "OpService", "PipelineExecutor", "PipelineFigures"]

NAMELESS: Final = "pipeline"
"""What KServe v2 calls a service without a name."""

_PLATFORM: Final = "ovmstrio_ops"
_WRONG_NAME: Final = "Failed to inference: Service name error."
_CLOSED: Final = "dag closed."

log = structlog.get_logger(__name__)


class PipelineExecutor(Protocol):
    """A running pipeline."""

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request; raises nothing but cancellation."""
        ...

    def obstacle(self) -> str:
        """Tell why requests cannot be answered now, such as a worker that died; empty if they can."""
        ...

    def close(self) -> None:
        """Answer with 3001 what waits for its turn, and whatever still comes; what is worked on goes on."""
        ...


class PipelineFigures(Protocol):
    """What is known of a running pipeline."""

    def snapshot(self) -> dict[str, Any]:
        """Give the figures for a live view."""
        ...

    @property
    def collectors(self) -> Sequence[Any]:
        """What gives the families of the metrics."""
        ...

    def render_metrics(self) -> bytes:
        """Print what scrapers get."""
        ...


class OpService(ResidentService):
    """One running pipeline.

    Args:
        name: under which it is served; None for a service without a name, which answers only nameless requests.
        executor: runs the Ops; whoever opened it closes it.
        figures: what is known of it; None for nothing.
        settings: its configuration.

    Attributes:
        metadata: what it tells of itself, which has neither inputs nor outputs.
        obstacle: tells why requests cannot be answered now; empty if they can.
        snapshot: gives the figures for a live view; None for none.
        render_metrics: prints what scrapers get; None for nothing.
        metrics: what gives the same to whoever has more to print.
        own_name: what requests must call it; empty for one that answers only nameless requests.
    """

    def __init__(
        self, name: str | None, executor: PipelineExecutor, figures: PipelineFigures | None, settings: PipelineSettings
    ) -> None:
        super().__init__()
        self.name = name or NAMELESS
        self.settings = settings
        self.metadata = ServableMetadata(self.name, _PLATFORM, (), ())
        self.obstacle = executor.obstacle
        self.snapshot = None if figures is None else figures.snapshot
        self.render_metrics = None if figures is None else figures.render_metrics
        self.metrics: Sequence[Any] = () if figures is None else figures.collectors
        self.own_name = name or ""
        self._executor = executor
        self._is_closed = False

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: an input is not what it says it is, or the pipeline refused it.
            ServerError: of the kind that the pipeline's ``err_no`` stands for.

        Cancellation: at any checkpoint; the pipeline gives back what the call held.
        """
        return infer_response(self.name, request, await self._run(pipeline_request(request), request.deadline))

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request, whatever comes of it.

        Raises: nothing but cancellation.

        Cancellation: at any checkpoint; the pipeline gives back what the request held.
        """
        if request.name and request.name != self.own_name:
            log.error("service name error", log_id=request.logid, asked=request.name[:80], name=self.own_name)
            return PipelineResponse(CustomExceptionCode.NO_SERVICE.value, _WRONG_NAME)
        if self._is_closed:
            return PipelineResponse(CustomExceptionCode.CLOSED_ERROR.value, _CLOSED)
        return await self._run(request, deadline)

    async def _run(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        pipeline = PIPELINE.set(self.name)
        try:
            return await self._executor.infer(request, deadline)
        finally:
            PIPELINE.reset(pipeline)

    # End

    def begin_drain(self) -> None:
        """Answer what waits for its turn, and all that comes, with 3001; what is worked on goes on."""
        self._is_closed = True
        self._executor.close()
