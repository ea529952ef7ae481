"""Replica of a group: an actor of Ray Serve on asyncio, with its server on trio."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import get_replica_context

from ovmstrio.cluster.ray.grpc import GrpcDoor
from ovmstrio.cluster.ray.http import HttpDoor
from ovmstrio.cluster.ray.links import GroupLink, LinkedKind, LinkedSpec, answer_linked, describe_linked
from ovmstrio.cluster.ray.request_streams import OpenStreams
from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.config.specs import ModelSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, NotReady, Problem, ServerError
from ovmstrio.isolation.codec import encode_error
from ovmstrio.server.kinds import KINDS, table_of
from ovmstrio.server.plan import Plan
from ovmstrio.server.rest_front_end import make_router
from ovmstrio.server.server import Hosting, serve_plan
from ovmstrio.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection

    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle

    from ovmstrio.cluster.ray.grpc import GrpcAnswer
    from ovmstrio.cluster.ray.http import HttpHead
    from ovmstrio.cluster.ray.links import AskGroup
    from ovmstrio.cluster.ray.request_streams import StreamReply
    from ovmstrio.core.http import Headers, HttpRequest
    from ovmstrio.serving.data_plane import DataPlane

__all__ = [
    "WAITING",
    "WANTED",
    "GroupReplica",
    "GroupServer",
    "HttpParts",
    "ReplicaPlan",
    "total_of",
    "wanted_replicas",
]

# Server

WAITING: Final = (
    "ovmstrio_queued_requests",
    "ovmstrio_waiting_calls",
    "ovmstrio_batch_queued_requests",
    "ovmstrio_llm_requests_waiting",
)
"""Metrics of queued requests; no request is in two of them."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Configuration of a replica, serializable for other machines with the same files.

    Attributes:
        called: called services of other groups, with their groups.
        owners: group by service for the ingress; empty for other groups.
        shards: number of shards of sharded groups.
        target_waiting: target queue length per replica for autoscaling, or None.
        most_streams: maximum streams from other groups.
    """

    group: str
    services: tuple[ServableSpec, ...]
    called: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    target_waiting: float | None = None
    most_streams: int = 50

    @property
    def server_settings(self) -> dict[str, Any]:
        """Settings of the server, with a sequence store per group."""
        settings = dict(self.settings)
        store = settings.pop("sequence_store", None)
        if store and any(isinstance(service, ModelSpec) and service.stateful for service in self.services):
            settings["sequence_store"] = Path(store) / self.group
        return settings

    @property
    def server(self) -> ServerSpec:
        """Configuration of the server: own services and links to called ones."""
        linked = (
            LinkedSpec(name=name, base_path=Path(), group=group, shards=self.shards.get(group, 1))
            for name, group in self.called.items()
        )
        return ServerSpec(services=(*self.services, *linked))


class GroupServer:
    """Server of a replica, on the trio side.

    Attributes:
        plane: data plane; set after the start.
        tasks: nursery for work that outlives calls; set after the start.
    """

    plane: DataPlane
    http: HttpDoor
    grpc: GrpcDoor
    tasks: trio.Nursery

    def __init__(self, plan: ReplicaPlan, ask: AskGroup) -> None:
        self._plan = plan
        self._kinds = {**KINDS, **table_of(LinkedKind(ask))}

    async def run(
        self, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until ``until`` returns, then drain; reports the start when everything is loaded.

        Raises:
            ConfigError: a service cannot be loaded, with all problems.
        """
        settings = ServerSettings(allow_empty=True, console="off", **self._plan.server_settings)
        plan = Plan(settings=settings, spec=self._plan.server, kinds=self._kinds)
        async with trio.open_nursery() as self.tasks:
            running = await self.tasks.start(self._serve, plan, until)
            await running.wait_loaded()
            self._check()
            task_status.started()

    @property
    def waiting(self) -> float:
        """Number of requests queued for admission, threads, batches or engines."""
        return total_of(self.plane.render_metrics(WAITING) or b"")

    async def _serve(
        self, plan: Plan, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[Any]
    ) -> None:
        async with trio.open_nursery() as nursery:
            serve = partial(serve_plan, plan, Hosting(until=until), handle_signals=False)
            running = await nursery.start(serve)
            self.plane = running.plane
            size = plan.settings.max_message_size
            router = make_router(running.plane, size, openai_errors=plan.settings.openai_errors)
            self.http = HttpDoor(router, self.tasks, size)
            self.grpc = GrpcDoor(running.plane, size)
            task_status.started(running)
        self.tasks.cancel_scope.cancel()

    def _check(self) -> None:
        readiness = self.plane.readiness()
        if readiness.ready:
            return
        errors = [each for each in self.plane.registry.findings() if each.severity == "error"]
        raise ConfigError(errors or [Problem(f'the group "{self._plan.group}" is not ready: {readiness.reason}')])


def total_of(metrics: bytes) -> float:
    """Return the sum of all samples of a metrics text."""
    families = text_string_to_metric_families(metrics.decode())
    return sum(sample.value for family in families for sample in family.samples)


# Autoscaling

WANTED: Final = "ovmstrio_wanted_replicas"
"""Metric of a replica: number of replicas that would keep its queues at their target."""


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of replicas, before Ray's limits and delays."""
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    by_queues = sum((context.aggregated_metrics or {}).get(WANTED, {}).values())
    return max(by_requests, by_queues), {}


# Actor

HttpParts = tuple[int, "Headers", bytes]


class GroupReplica:
    """Replica of a group, created and called on Ray's asyncio loop.

    Args:
        repeatable: groups without user code, whose calls may be repeated after the loss of a replica.
    """

    async def __init__(  # type: ignore[misc]  # Ray waits for it
        self, plan: ReplicaPlan, handles: dict[str, DeploymentHandle], repeatable: Collection[str]
    ) -> None:
        self.plan = plan
        self.links = {
            name: GroupLink(name, handle, is_repeatable=name in repeatable) for name, handle in handles.items()
        }
        self._streams = OpenStreams(get_replica_context().replica_id.unique_id, plan.most_streams)
        self.trio = TrioGuest()
        self.server = GroupServer(plan, self._ask_group)
        await self.trio.start(self.server.run)

    async def _ask_group(self, group: str, method: str, *arguments: Any) -> Any:
        return await self.trio.ask(self.links[group].answer, method, *arguments)

    async def check_health(self) -> None:
        """Raise if the server has stopped; called by Ray.

        Raises:
            NotReady: the server has stopped; Ray starts another replica.
        """
        if self.trio.has_ended:
            raise NotReady(f'the server of group "{self.plan.group}" has stopped')

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return custom autoscaling metrics; called by Ray every few seconds."""
        target = self.plan.target_waiting
        return {} if target is None else {WANTED: self.server.waiting / target}

    async def __del__(self) -> None:
        """Drain after Ray has sent the last request."""
        await self.trio.aclose()

    async def obstacle(self) -> str:
        """Return why the services are not ready, or an empty text."""
        readiness = self.server.plane.readiness()
        return "" if readiness.ready else readiness.reason

    async def infer_linked(self, data: bytes, seconds: float) -> tuple[bool, Any]:
        """Answer an inference call of another group: success flag, and result or error."""
        try:
            return True, await self.trio.call(answer_linked, self.server.plane, data, seconds)
        except ServerError as error:
            return False, encode_error(error)

    async def describe_linked(self, name: str) -> tuple[bool, Any]:
        """Return the metadata of a service to another group: success flag, and result or error."""
        try:
            return True, await self.trio.call(describe_linked, self.server.plane, name)
        except ServerError as error:
            return False, encode_error(error)

    async def answer_grpc(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcAnswer:
        """Answer a gRPC call for a service of this group."""
        return await self.trio.call(self.server.grpc.answer, path, data, seconds)

    async def open_stream(self) -> AsyncIterator[str | StreamReply]:
        """Answer an inference stream for a service of this group: first its key, then the replies."""
        async with aclosing(self._streams.open(self.trio, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply

    async def push_to_stream(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Add a request, the end or a heartbeat to a stream; return whether the stream is open."""
        return await self._streams.push(key, message, is_last=is_last)

    async def answer_http(self, request: HttpRequest) -> HttpParts:
        """Answer an HTTP request for a service of this group with a complete body."""
        head = await self.trio.call(self.server.http.answer, request)
        if head.pieces is None:
            return head[:3]
        async with aclosing(self.pieces(head)) as pieces:
            return head.status, head.headers, b"".join([piece async for piece in pieces])

    async def stream_http(self, request: HttpRequest) -> AsyncIterator[Any]:
        """Answer as :meth:`answer_http`, with status and headers first and then the chunks of the body."""
        head = await self.trio.call(self.server.http.answer, request)
        yield head.status, head.headers
        if head.pieces is None:
            yield head.body
            return
        async with aclosing(self.pieces(head)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(self, head: HttpHead) -> AsyncGenerator[bytes]:
        """Yield the chunks of a streamed body."""
        assert head.pieces is not None  # noqa: S101 - checked by the caller
        try:
            while True:
                try:
                    yield await self.trio.call(head.pieces.receive)
                except trio.EndOfChannel:
                    return
        finally:
            await asyncio.shield(self.trio.call(head.pieces.aclose))
