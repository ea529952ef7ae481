"""The nursery tree of one pipeline's server.

::

    serve_pipeline ── registry        the pipeline under its name, for KServe v2
                   ├─ gRPC front end  PipelineService, KServe v2, health, reflection
                   └─ HTTP front end  /{name}/{method}, /v2, /health, /metrics, /trace
                   ├─ metrics         /health and /metrics at a port of their own
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from ovmstrio.api.infer_lane import InferRoutes
from ovmstrio.api.paddle.http import make_application, make_metrics_application
from ovmstrio.api.paddle.pipeline_calls import PipelineCalls
from ovmstrio.config.specs import ModelSpec, OpPipelineSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.registry import Registry
from ovmstrio.runtimes.ops.op_servable import OpPipelineServable, PipelineInfer
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.http.http_server import HttpFrontEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.core.servable import Servable
    from ovmstrio.runtimes.ops.ports import Ports
    from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse
    from ovmstrio.wire.http.lane_head import Head

__all__ = ["MAX_MESSAGE_BYTES", "Listening", "PipelineExecutor", "RunningPipeline", "serve_pipeline"]

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES: Final = 256 * 2**20
_NAMELESS: Final = "pipeline"
"""What KServe v2 calls a service without a name."""


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


def _every_host() -> tuple[str, ...]:
    return ("0.0.0.0", "[::]") if _has_ipv6() else ("0.0.0.0",)  # noqa: S104 - a service is for others


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where and how a pipeline is served.

    Attributes:
        hosts: addresses of this machine for gRPC; every one by default.
        http_hosts: those for HTTP, if they are others.
        http_status: whether HTTP tells failures by its status.
        drain_seconds: how long requests get when the server ends.
        render_metrics: prints what scrapers get; None for nothing.
        metrics_port: a port for scrapers alone; None for none, HTTP's port serves them too.
        snapshot: gives the figures for a live view; None for none.
    """

    ports: Ports
    hosts: Sequence[str] = field(default_factory=_every_host)
    http_hosts: Sequence[str] | None = None
    http_status: bool = False
    drain_seconds: float = 30.0
    render_metrics: Callable[[], bytes] | None = None
    metrics_port: int | None = None
    snapshot: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """A server that accepts requests, as it is reported to whoever started it; ``drain`` ends it gently."""

    plane: DataPlane
    grpc: list[str]
    http: list[str]
    metrics: list[str]
    drain: Callable[[], object]


async def serve_pipeline(
    name: str | None,
    executor: PipelineExecutor,
    listening: Listening,
    *,
    task_status: trio.TaskStatus[RunningPipeline] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Serve a running pipeline until it is drained; True if it ended gently.

    Reports a :class:`RunningPipeline` once requests are accepted.

    Raises:
        OSError: a port cannot be bound.

    Ownership: everything but the executor is closed when this returns.

    Cancellation: ends everything at once, without drain.
    """
    server = _Server(name, executor, listening)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.registry.run)
        await server.registry.apply([OpPipelineSpec(name=server.name, base_path=Path.cwd())])
        drain = partial(server.drain, nursery.cancel_scope)
        grpc = await nursery.start(server.grpc.serve)
        http = [] if server.http is None else await nursery.start(server.http.serve)
        metrics = [] if server.metrics is None else await nursery.start(server.metrics.serve)
        server.plane.begin_serving()
        task_status.started(RunningPipeline(server.plane, grpc, http, metrics, partial(nursery.start_soon, drain)))
    return server.drained


def _addresses(hosts: Sequence[str], port: int) -> list[str]:
    return [f"{host}:{port}" for host in hosts]


class _NoRoutes:
    """Leaves every request to the application."""

    prefixes: Final = ()

    def route(self, head: Head) -> None:
        """Find nothing."""


class _CutRequests:
    """Passes requests on to a pipeline, and counts those that a drain has cut off."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self._executor = executor
        self._ends = math.inf
        self._open = self._ended = 0

    @property
    def count(self) -> int:
        """How many are cut, or will be as soon as whoever waits for them is cancelled."""
        return self._open + self._ended

    def count_after(self, when: float) -> None:
        """Count what is cancelled from a time on, of trio's clock, when it is no client that leaves."""
        self._ends = when

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request.

        Raises: nothing but cancellation.

        Cancellation: as the pipeline's.
        """
        self._open += 1
        is_answered = False
        try:
            response = await self._executor.infer(request, deadline)
            is_answered = True
        finally:
            self._open -= 1
            self._ended += not is_answered and trio.current_time() >= self._ends
        return response


class _AnsweringPipeline(OpPipelineServable):
    """The pipeline with all its protocols."""

    def __init__(self, name: str, infer: PipelineInfer, calls: PipelineCalls) -> None:
        super().__init__(name, infer)
        self.name = name
        self._calls = calls

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request of Paddle Serving's own protocols.

        Raises: nothing but cancellation.

        Cancellation: as the pipeline's.
        """
        return await self._calls.answer(request, deadline)


class _Server:
    """The parts of one server, wired to each other."""

    def __init__(self, name: str | None, executor: PipelineExecutor, listening: Listening) -> None:
        self.name = name or _NAMELESS
        self.drained = False
        self._listening = listening
        self._executor = executor
        self._cut = _CutRequests(executor)
        self._calls = PipelineCalls(name, self._cut)
        self.registry = Registry(self._load, poll_seconds=0)
        self.plane = DataPlane(self.registry, obstacle=executor.obstacle)
        self.grpc = GrpcFrontEnd(
            self.plane,
            _addresses(listening.hosts, listening.ports.rpc),
            limits=TransportLimits(
                max_receive_message_bytes=MAX_MESSAGE_BYTES, max_send_message_bytes=MAX_MESSAGE_BYTES
            ),
        )
        self.http = None if listening.ports.http is None else self._http(listening.ports.http)
        self.metrics = self._metrics()

    def _http(self, port: int) -> HttpFrontEnd:
        application = make_application(
            self._calls,
            self.plane,
            max_body_bytes=MAX_MESSAGE_BYTES,
            render_metrics=self._listening.render_metrics,
            snapshot=self._listening.snapshot,
            http_status=self._listening.http_status,
        )
        routes = InferRoutes(self.plane)
        return HttpFrontEnd(self._http_addresses(port), routes, application, max_body_bytes=MAX_MESSAGE_BYTES)

    def _metrics(self) -> HttpFrontEnd | None:
        port, render = self._listening.metrics_port, self._listening.render_metrics
        if render is None or port is None:
            return None
        return HttpFrontEnd(self._http_addresses(port), _NoRoutes(), make_metrics_application(self.plane, render))

    def _http_addresses(self, port: int) -> list[str]:
        return _addresses(self._listening.http_hosts or self._listening.hosts, port)

    async def _load(self, spec: ModelSpec, version: int, directory: Path) -> Servable:
        """Give what runs already; it is called again by nothing but a request's look-up."""
        del spec, version, directory
        return _AnsweringPipeline(self.name, self._cut.infer, self._calls)

    async def drain(self, everything: trio.CancelScope) -> None:
        """End gently: what waits is answered 3001, what is worked on gets its time, and ``everything`` is cancelled.

        The server has not been drained if requests did not end in that time.

        Cancellation: leaves the drain where it is.
        """
        self.plane.begin_drain()
        self._calls.close()
        self._executor.close()
        self._cut.count_after(trio.current_time() + self._listening.drain_seconds)
        async with trio.open_nursery() as nursery:
            for end in (self.grpc, self.http, self.metrics):
                if end is not None:
                    nursery.start_soon(end.drain, self._listening.drain_seconds)
        if self._cut.count:
            log.warning("requests cut", count=self._cut.count, drain_seconds=self._listening.drain_seconds)
        else:
            log.info("drained")
        self.drained = not self._cut.count
        everything.cancel()
