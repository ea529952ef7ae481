"""An echo pipeline, and servers of pipelines on free ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ovmstrio.config.specs import OpPipelineSpec, ServerSpec
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.ops.messages import (
    ChannelData,
    ChannelDataType,
    PipelineRequest,
    PipelineResponse,
    holds_arrays,
    pack_response,
    unpack_request,
)
from ovmstrio.ops.op_service import DEFAULT_NAME, OpService, PipelineExecutor
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.plan import Plan
from ovmstrio.server.service_plan import service_settings
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.serving.kind import LoadContext
from tests.support.served_in_thread import ServedPlan, serving_plan

LOOPBACK = ("127.0.0.1:0",)


class EchoExecutor:
    """Executor that returns the input of each request, as texts or tensors, or ``answer``; ``gate`` holds requests."""

    def __init__(self, *, as_tensors: bool = False) -> None:
        self.requests: list[PipelineRequest] = []
        self.deadlines: list[float] = []
        self.answer: PipelineResponse | None = None
        self.gate = trio.Event()
        self.gate.set()
        self.arrived = trio.Event()
        self.cancelled: list[PipelineRequest] = []
        self.problem = ""
        self.closed = trio.Event()
        self._as_tensors = as_tensors

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        self.requests.append(request)
        self.deadlines.append(deadline)
        self.arrived.set()
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.cancelled.append(request)
            raise
        if self.answer is not None:
            return self.answer
        try:
            values: dict[str, Any] = unpack_request(request)
        except ValueError as error:
            return PipelineResponse(8000, f"rpc package error: {error}")
        if not holds_arrays(values):
            return pack_response(ChannelData(dictdata=values))
        data = ChannelData(datatype=ChannelDataType.CHANNEL_NPDATA.value, npdata=values)
        return pack_response(data, as_tensors=self._as_tensors)

    def unready_reason(self) -> str:
        return self.problem

    def close(self) -> None:
        self.closed.set()


class _ExecutorKind(OpPipelineKind):
    def __init__(self, make: Callable[[], OpService]) -> None:
        super().__init__()
        self._make = make

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        del version, directory
        return await host_service(context.tasks, self._opened(spec, context), kind=self.name, name=spec.name)

    @asynccontextmanager
    async def _opened(self, spec: OpPipelineSpec, context: LoadContext) -> AsyncIterator[OpService]:
        del spec
        service = self._make()
        with context.meters.collecting(service.metrics, ""):
            yield service


def executor_plan(
    executor: PipelineExecutor,
    name: str | None = "uci",
    *,
    snapshot: Callable[[], dict[str, Any]] | None = None,
    render_metrics: Callable[[], bytes] | None = None,
    collectors: Sequence[Any] = (),
    http_status: bool = False,
    scrapers: bool = False,
    **options: Any,
) -> Plan:
    """Plan to serve an executor at the root of free ports of loopback, without the metrics of the server."""

    def make() -> OpService:
        service = OpService(name, executor, None, PipelineSettings(http_status=http_status))
        service.snapshot, service.render_metrics, service.metrics = snapshot, render_metrics, collectors
        return service

    entry = name or DEFAULT_NAME
    return Plan(
        settings=service_settings({"metrics_enable": False, **options}),
        spec=ServerSpec(services=(OpPipelineSpec(name=entry, base_path=Path.cwd()),)),
        kinds={**KINDS, OpPipelineKind.name: _ExecutorKind(make)},
        grpc=LOOPBACK,
        rest=LOOPBACK,
        metrics=LOOPBACK if scrapers else (),
        root=entry,
    )


@asynccontextmanager
async def serving_pipeline(
    executor: PipelineExecutor, name: str | None = "uci", **options: Any
) -> AsyncIterator[ServedPlan]:
    async with serving_plan(executor_plan(executor, name, **options)) as served:
        yield served
