"""A server without listeners for the services of one group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from prometheus_client.parser import text_string_to_metric_families

from ovmstrio.cluster.ray.grpc import ClusterGrpcHandler
from ovmstrio.cluster.ray.http import ClusterHttpHandler
from ovmstrio.cluster.ray.linked_services import LinkedKind, LinkedSpec
from ovmstrio.config.specs import ModelSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.server.kinds import KINDS, table_of
from ovmstrio.server.plan import Plan
from ovmstrio.server.server import WorkerProcessContext, serve_plan
from ovmstrio.server.settings import ServerSettings

if TYPE_CHECKING:
    from ovmstrio.cluster.ray.linked_services import AskGroup
    from ovmstrio.serving.data_plane import DataPlane

QUEUE_METRICS: Final = (
    "ovmstrio_queued_requests",
    "ovmstrio_thread_queue_length",
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
    http: ClusterHttpHandler
    grpc: ClusterGrpcHandler
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
        return sum_samples(self.plane.render_metrics(QUEUE_METRICS) or b"")

    async def _serve(
        self, plan: Plan, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[Any]
    ) -> None:
        async with trio.open_nursery() as nursery:
            serve = partial(serve_plan, plan, WorkerProcessContext(wait_drain=until), handle_signals=False)
            running = await nursery.start(serve)
            self.plane = running.plane
            size = plan.settings.max_message_size
            router = make_rest_router(
                running.plane,
                size,
                openai_errors=plan.settings.openai_errors,
                sse_keep_alive_interval=plan.settings.sse_keep_alive_interval,
            )
            self.http = ClusterHttpHandler(router, self.tasks, size)
            self.grpc = ClusterGrpcHandler(running.plane, size)
            task_status.started(running)
        self.tasks.cancel_scope.cancel()

    def _check(self) -> None:
        readiness = self.plane.readiness()
        if readiness.ready:
            return
        errors = [each for each in self.plane.registry.findings() if each.severity == "error"]
        raise ConfigError(errors or [Problem(f'the group "{self._plan.group}" is not ready: {readiness.reason}')])


def sum_samples(metrics: bytes) -> float:
    """Return the sum of all samples of a metrics text."""
    families = text_string_to_metric_families(metrics.decode())
    return sum(sample.value for family in families for sample in family.samples)
