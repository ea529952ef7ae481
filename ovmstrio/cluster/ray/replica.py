"""What Ray runs: a replica of a group, which is asked by other groups, on Ray's loop, and answers on trio's."""

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

# ----------------------------------------------------------------------
# The server of one replica: a registry, a data plane and the tables of its doors, without anything that listens
# ----------------------------------------------------------------------

WAITING: Final = (
    "ovmstrio_queued_requests",
    "ovmstrio_waiting_calls",
    "ovmstrio_batch_queued_requests",
    "ovmstrio_llm_requests_waiting",
)
"""The metrics of what waits, of which no request is in two."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What a replica is to do; plain enough to be sent to another machine that has the same files.

    Attributes:
        group: whose replica it is.
        services: that it runs.
        called: services of other groups that those call, with the names of their groups.
        owners: the group of each service of the configuration, for the group that has the doors; empty for others.
        settings: of the server, by their names.
        shards: how many parts the groups have that have several, by their names.
        target_waiting: how many requests are to wait in each replica, where their number follows that.
        most_streams: how many streams of requests other groups may have open at a replica.
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
        """The settings of its server: sequences are kept in a folder of the group's own, where it has any."""
        settings = dict(self.settings)
        store = settings.pop("sequence_store", None)
        if store and any(isinstance(service, ModelSpec) and service.stateful for service in self.services):
            settings["sequence_store"] = Path(store) / self.group
        return settings

    @property
    def server(self) -> ServerSpec:
        """What the replica's server serves: its services, and those that they call elsewhere."""
        linked = (
            LinkedSpec(name=name, base_path=Path(), group=group, shards=self.shards.get(group, 1))
            for name, group in self.called.items()
        )
        return ServerSpec(services=(*self.services, *linked))


class GroupServer:
    """Runs on the trio side of a replica.

    Args:
        plan: what it does.
        ask: the other groups.

    Attributes:
        plane: every call of a service; once it has started.
        http: its door.
        grpc: its door.
        tasks: owns what calls leave running; once it has started.
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
        """Serve until ``until`` returns, and then drain; reports once everything is loaded.

        Raises:
            ConfigError: something cannot be loaded; all that is wrong is told.

        Ownership: services, and what calls leave running.
        Cancellation: ends everything at once.
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
        """How many requests wait in it: for a place, a thread, a batch or the engine of a model of text."""
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
    """Add up all samples of metrics in Prometheus's text format."""
    families = text_string_to_metric_families(metrics.decode())
    return sum(sample.value for family in families for sample in family.samples)


# ----------------------------------------------------------------------
# How many replicas a group should have, by its requests and by what waits in the queues of its servers
# ----------------------------------------------------------------------

WANTED: Final = "ovmstrio_wanted_replicas"
"""What a replica reports: how many replicas its queues would keep at their target."""


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Tell Ray how many replicas there should be, before its bounds and delays."""
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    by_queues = sum((context.aggregated_metrics or {}).get(WANTED, {}).values())
    return max(by_requests, by_queues), {}


# ----------------------------------------------------------------------
# What Ray runs: a replica of a group, which is asked by other groups, on Ray's loop, and answers on trio's
# ----------------------------------------------------------------------

HttpParts = tuple[int, "Headers", bytes]


class GroupReplica:
    """One replica of a group; made and called on Ray's asyncio loop.

    Args:
        plan: what it does.
        handles: the ways to other groups, by their names.
        repeatable: the groups whose calls may be made once more when a replica was lost, as no code of users is there.

    Ownership: the trio side, which ends with the replica.

    Attributes:
        plan: what it does.
        links: the ways to other groups.
        trio: the loop of its server.
        server: answers there.
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
        """Ask another group; from the trio side."""
        return await self.trio.ask(self.links[group].answer, method, *arguments)

    async def check_health(self) -> None:
        """Tell Ray whether the replica can answer.

        Raises:
            NotReady: it cannot; Ray starts another one in its place.
        """
        if self.trio.has_ended:
            raise NotReady(f'the server of group "{self.plan.group}" has ended')

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray, every few seconds, what the number of replicas is to follow besides requests."""
        target = self.plan.target_waiting
        return {} if target is None else {WANTED: self.server.waiting / target}

    async def __del__(self) -> None:
        """End gently, when Ray has sent the last request."""
        await self.trio.aclose()

    # Of this group, for others of it and for other groups

    async def obstacle(self) -> str:
        """Tell why its services cannot be called, empty if they can."""
        readiness = self.server.plane.readiness()
        return "" if readiness.ready else readiness.reason

    async def infer_linked(self, data: bytes, seconds: float) -> tuple[bool, Any]:
        """Answer a call of a service of another group: whether it succeeded, and what came of it."""
        try:
            return True, await self.trio.call(answer_linked, self.server.plane, data, seconds)
        except ServerError as error:
            return False, encode_error(error)

    async def describe_linked(self, name: str) -> tuple[bool, Any]:
        """Tell a service of another group what one of this group takes."""
        try:
            return True, await self.trio.call(describe_linked, self.server.plane, name)
        except ServerError as error:
            return False, encode_error(error)

    async def answer_grpc(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcAnswer:
        """Answer a call whose service is of this group."""
        return await self.trio.call(self.server.grpc.answer, path, data, seconds)

    async def open_stream(self) -> AsyncIterator[str | StreamReply]:
        """Answer a stream of inferences whose service is of this group: its key first, and then the replies."""
        async with aclosing(self._streams.open(self.trio, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply

    async def push_to_stream(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Take a request of a stream, its end, or a sign of life; gives whether it is still open."""
        return await self._streams.push(key, message, is_last=is_last)

    async def answer_http(self, request: HttpRequest) -> HttpParts:
        """Answer a request whose service is of this group, with a whole body."""
        head = await self.trio.call(self.server.http.answer, request)
        if head.pieces is None:
            return head[:3]
        async with aclosing(self.pieces(head)) as pieces:
            return head.status, head.headers, b"".join([piece async for piece in pieces])

    async def stream_http(self, request: HttpRequest) -> AsyncIterator[Any]:
        """Answer as :meth:`answer_http`, with status and headers first, and then the pieces of the body."""
        head = await self.trio.call(self.server.http.answer, request)
        yield head.status, head.headers
        if head.pieces is None:
            yield head.body
            return
        async with aclosing(self.pieces(head)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(self, head: HttpHead) -> AsyncGenerator[bytes]:
        """Give the pieces of a body that comes in pieces."""
        assert head.pieces is not None  # noqa: S101 - the caller has looked
        try:
            while True:
                try:
                    yield await self.trio.call(head.pieces.receive)
                except trio.EndOfChannel:
                    return
        finally:
            await asyncio.shield(self.trio.call(head.pieces.aclose))
