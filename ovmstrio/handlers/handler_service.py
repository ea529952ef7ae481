"""A project beside models and graphs: loaded, loaded again and retired as they are, but called by its own paths."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import GrpcDeclaration
from ovmstrio.handlers.building import Supplies, open_handler
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.grpc.project import GrpcProject, open_rpc_handler, proto_of
from ovmstrio.handlers.isolated.isolated_handler import IsolatedModels, open_isolated_handler
from ovmstrio.handlers.models.library import open_models
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.serving.hosted_service import ResidentService, host

if TYPE_CHECKING:
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.handlers.grpc.services import UserProto
    from ovmstrio.handlers.handler import HttpHandler
    from ovmstrio.handlers.models.library import ModelsInfo
    from ovmstrio.serving.kind import LoadContext

__all__ = [
    "HandlerServable",
    "examine_mounted",
    "load_handler",
    "load_project",
    "read_mounted",
]

_PLATFORM: Final = "handler"


class HandlerServable(ResidentService):
    """A loaded project as the registry has it.

    Args:
        name: that it is served under.
        handler: the user's object.
        limit: how many requests may be in flight; None where nobody counts them.
        grpc: its services; None if it is called over HTTP.
        models: tells of the project's.

    Attributes:
        concurrency_limit: what counts its calls, from before their bodies are read.
        declaration: the services that it brings, None if it is called over HTTP.
    """

    def __init__(
        self,
        name: str,
        handler: HttpHandler,
        limit: ConcurrencyLimit | None,
        grpc: GrpcProject | None,
        models: ModelsInfo,
    ) -> None:
        super().__init__()
        self.handler = handler
        self.models = models
        self.concurrency_limit = limit
        self.grpc = grpc
        self.declaration = None if grpc is None else declaration_of(grpc.proto)
        self._metadata = ServableMetadata(name, _PLATFORM, (), ())

    @property
    def obstacle(self) -> str:
        """Why it cannot be called now, empty if it can."""
        return self.handler.obstacle

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself, which has neither inputs nor outputs."""
        return self._metadata


def declaration_of(proto: UserProto) -> GrpcDeclaration:
    """Give what the server has to know of the services of a project."""
    return GrpcDeclaration(tuple(service.name for service in proto.services), str(proto.source), proto.files)


log = structlog.get_logger(__name__)


def examine_mounted(spec: HandlerSpec) -> tuple[ProjectSpec, list[Problem]]:
    """Read a project that is served beside others, and give it with warnings; blocking.

    Raises:
        ConfigError: it cannot be used, or not there.
    """
    if spec.errors:
        raise ConfigError(spec.errors)
    if not spec.path.exists():
        raise ConfigError([Problem("the project does not exist", path="path", found=str(spec.path))])
    project, warnings = read_project(spec.path, mounted_as=spec.name)
    if project.processes != 1:
        problem = Problem("one process serves all of config.json", str(project.file), path="processes")
        way = "leave it out, or serve the project alone: ovms serve FILE"
        raise ConfigError([replace(problem, expected="1", found=str(project.processes), suggestion=way)])
    return project, warnings


def read_mounted(spec: HandlerSpec) -> ProjectSpec:
    """Read a project as :func:`examine_mounted`, and log its warnings; blocking.

    Raises:
        ConfigError: it cannot be used, or not there.
    """
    project, warnings = examine_mounted(spec)
    for warning in warnings:
        log.warning("handler", handler=spec.name, problem=str(warning))
    return project


async def load_handler(spec: HandlerSpec, context: LoadContext) -> HandlerServable:
    """Load a project; the caller owns the servable and closes it.

    Args:
        spec: how it was configured.
        context: what the server lends; one that is alone has been read, and told of, before.

    Raises:
        ConfigError: the project cannot be used, or its handler cannot be loaded.

    Cancellation: while it loads; nothing is left.
    """
    read = _read_alone if context.is_alone else read_mounted
    project = await trio.to_thread.run_sync(read, spec, abandon_on_cancel=True)
    mounted_as = "" if context.is_alone else spec.name
    memory_limit = context.python_memory_limit
    isolation = Isolation.of(spec.python, is_default=context.isolates_python, memory_limit=memory_limit)
    return await load_project(project, context, isolation=isolation, mounted_as=mounted_as)


def _read_alone(spec: HandlerSpec) -> ProjectSpec:
    return read_project(spec.path)[0]


async def load_project(
    project: ProjectSpec, context: LoadContext, *, isolation: Isolation | None = None, mounted_as: str = ""
) -> HandlerServable:
    """Load a project that has been read; as :func:`load_handler`.

    Args:
        project: what to load.
        context: what the server lends.
        isolation: how its code is run in processes of its own; None for threads.
        mounted_as: the name that it was read with, where it is served beside others.

    Raises:
        ConfigError: its handler cannot be loaded.

    Cancellation: while it loads; nothing is left.
    """
    opened = _opened(project, context) if isolation is None else _isolated(project, context, isolation, mounted_as)
    return await host(context.tasks, opened, kind=HandlerSpec.kind, name=project.name)


@asynccontextmanager
async def _isolated(
    project: ProjectSpec, context: LoadContext, isolation: Isolation, mounted_as: str
) -> AsyncIterator[HandlerServable]:
    """Host a project whose code runs in processes of its own, until the block ends."""
    limit, hooks = context.make_limit(project.max_concurrency, project.name), context.meters.batches(project.name, "1")
    opening = open_isolated_handler(
        project, isolation, mounted_as=mounted_as, batch_hooks=hooks, queue_timeout=context.queue_timeout
    )
    if project.protobuf_path is None:
        async with opening as handler:
            yield HandlerServable(project.name, handler, limit, None, IsolatedModels(handler))
        return
    async with proto_of(project) as proto, opening as handler:
        grpc = GrpcProject(proto, handler)
        yield HandlerServable(project.name, handler, limit, grpc, IsolatedModels(handler))


@asynccontextmanager
async def _opened(project: ProjectSpec, context: LoadContext) -> AsyncIterator[HandlerServable]:
    """Host a project until the block ends."""
    _export(project)
    limit, is_alone = context.make_limit(project.max_concurrency, project.name), context.is_alone
    seconds = context.queue_timeout
    batch_hooks = context.meters.batches(project.name, "1")
    async with open_models(project) as models:
        if project.protobuf_path is not None:
            loading_rpc = partial(open_rpc_handler, clients=models.clients, is_alone=is_alone, queue_timeout=seconds)
            async with proto_of(project) as proto, loading_rpc(project, proto) as rpc_handler:
                grpc = GrpcProject(proto, rpc_handler)
                yield HandlerServable(project.name, rpc_handler, limit, grpc, models)
            return
        loading = partial(open_handler, supplies=Supplies(models.clients), is_alone=is_alone, queue_timeout=seconds)
        async with loading(project, batch_hooks=batch_hooks) as handler:
            yield HandlerServable(project.name, handler, limit, None, models)


def _export(project: ProjectSpec) -> None:
    """Export a project's environment to the process that it shares, which it must not change for others."""
    for name, value in project.environment.items():
        if os.environ.setdefault(name, value) != value:
            log.warning("the environment has another value already", handler=project.name, variable=name)
