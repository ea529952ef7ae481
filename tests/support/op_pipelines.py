"""A pipeline that answers with what it was asked, and servers of pipelines on free ports."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from ovmstrio.ops_server import Listening, RunningPipeline, serve_pipeline

from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
from ovmstrio.runtimes.ops.config.pipeline_file import Ports
from ovmstrio.runtimes.ops.op_service import OpService, PipelineExecutor
from ovmstrio.runtimes.ops.tensors import holds_arrays, pack, unpack
from ovmstrio.runtimes.ops.values import ChannelData, ChannelDataType, PipelineRequest, PipelineResponse
from ovmstrio.runtimes.resident import host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["EchoExecutor", "serving_pipeline"]


class EchoExecutor:
    """Answers every request with its own input, as texts or as tensors.

    Attributes:
        requests: all that came.
        answer: is given instead of the echo, if it is set.
        gate: holds requests back until it is set; set at first.
        problem: what ``obstacle`` says.
    """

    def __init__(self, *, as_tensors: bool = False) -> None:
        self.requests: list[PipelineRequest] = []
        self.deadlines: list[float] = []
        self.answer: PipelineResponse | None = None
        self.gate = trio.Event()
        self.gate.set()
        self.arrived = trio.Event()
        self.left = trio.Event()
        self.problem = ""
        self.closed = trio.Event()
        self._as_tensors = as_tensors

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request."""
        self.requests.append(request)
        self.deadlines.append(deadline)
        self.arrived.set()
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.left.set()
            raise
        if self.answer is not None:
            return self.answer
        try:
            values: dict[str, Any] = unpack(request)
        except ValueError as error:
            return PipelineResponse(8000, f"rpc package error: {error}")
        if not holds_arrays(values):
            return pack(ChannelData(dictdata=values))
        data = ChannelData(datatype=ChannelDataType.CHANNEL_NPDATA.value, npdata=values)
        return pack(data, as_tensors=self._as_tensors)

    def obstacle(self) -> str:
        """Tell the problem that was set."""
        return self.problem

    def close(self) -> None:
        """Note that it is closed."""
        self.closed.set()


@asynccontextmanager
async def op_service(
    executor: PipelineExecutor,
    name: str | None = "uci",
    snapshot: Callable[[], dict[str, Any]] | None = None,
    render_metrics: Callable[[], bytes] | None = None,
) -> AsyncIterator[OpService]:
    """Give an executor's service, which knows what it is given."""
    service = OpService(name, executor, None, PipelineSettings())
    service.snapshot, service.render_metrics = snapshot, render_metrics
    yield service


@asynccontextmanager
async def serving_pipeline(
    executor: PipelineExecutor,
    name: str | None = "uci",
    snapshot: Callable[[], dict[str, Any]] | None = None,
    render_metrics: Callable[[], bytes] | None = None,
    **options: Any,
) -> AsyncIterator[RunningPipeline]:
    """Serve an executor over gRPC and HTTP on free ports of the loopback interface while the block lasts."""
    listening = Listening(ports=Ports(0, 0), hosts=("127.0.0.1",), **options)
    async with trio.open_nursery() as nursery:
        opened = op_service(executor, name, snapshot, render_metrics)
        service = await host(nursery, opened, kind="op pipeline", name=name or "")
        yield await nursery.start(serve_pipeline, service, listening)
        nursery.cancel_scope.cancel()
