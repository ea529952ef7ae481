"""Loaded Nucleus handler project as a service: loading in process or isolated, readiness, and gRPC handlers by path."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio
from grpclib.const import Cardinality, Handler

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import GrpcDeclaration
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.grpc.project import GrpcProject, open_project_proto, open_rpc_handler
from ovmstrio.handlers.handler_loading import HandlerDependencies, open_handler
from ovmstrio.handlers.isolated_handler import IsolatedModels, open_isolated_handler
from ovmstrio.handlers.models.library import open_models
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.serving.hosted_service import HostedService, host_service

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.service import Service
    from ovmstrio.handlers.grpc.proto_compiler import UserProto
    from ovmstrio.handlers.handler_loading import HttpHandler
    from ovmstrio.handlers.models.library import ModelInfoSource
    from ovmstrio.serving.kind import LoadContext

# ----------------------------------------------------------------------
# Handler projects as services of a server
# ----------------------------------------------------------------------

_PLATFORM: Final = "handler"


class HandlerService(HostedService):
    """Loaded handler project; ``limit`` is None if the server does not count concurrent requests.

    Attributes:
        concurrency_limit: acquired before request bodies are read.
        declaration: gRPC services for the front end; None for HTTP.
    """

    def __init__(
        self,
        name: str,
        handler: HttpHandler,
        limit: ConcurrencyLimit | None,
        grpc: GrpcProject | None,
        models: ModelInfoSource,
    ) -> None:
        super().__init__()
        self.handler = handler
        self.models = models
        self.concurrency_limit = limit
        self.grpc = grpc
        self.declaration = None if grpc is None else grpc_declaration(grpc.proto)
        self._metadata = ServableMetadata(name, _PLATFORM, (), ())

    @property
    def unready_reason(self) -> str:
        """Reason why calls fail now; empty if the handler is ready."""
        return self.handler.unready_reason

    @property
    def metadata(self) -> ServableMetadata:
        """Metadata without inputs and outputs."""
        return self._metadata


def grpc_declaration(proto: UserProto) -> GrpcDeclaration:
    """Return the declaration of a project's gRPC services for the front end."""
    return GrpcDeclaration(tuple(service.name for service in proto.services), str(proto.source), proto.files)


log = structlog.get_logger(__name__)


def validate_mounted(spec: HandlerSpec) -> tuple[ProjectSpec, list[Problem]]:
    """Read and check a project of ``handler_config_list``; return it with its warnings; blocking.

    Raises:
        ConfigError: the project is missing or invalid.
    """
    if spec.errors:
        raise ConfigError(spec.errors)
    if not spec.path.exists():
        raise ConfigError([Problem("the project does not exist", path="path", found=str(spec.path))])
    project, warnings = read_project(spec.path, mounted_as=spec.name)
    if project.processes != 1:
        problem = Problem("handlers of config.json share one process", str(project.file), path="processes")
        way = "remove the key, or serve the project alone: ovms serve FILE"
        raise ConfigError([replace(problem, expected="1", found=str(project.processes), suggestion=way)])
    return project, warnings


def read_mounted(spec: HandlerSpec) -> ProjectSpec:
    """Read a project as :func:`validate_mounted`, and log its warnings; blocking."""
    project, warnings = validate_mounted(spec)
    for warning in warnings:
        log.warning("handler project warning", handler=spec.name, problem=str(warning))
    return project


async def load_handler(spec: HandlerSpec, context: LoadContext) -> HandlerService:
    """Load a handler project; the caller closes the returned servable.

    Raises:
        ConfigError: the project is invalid, or its handler fails to load.
    """
    if context.is_alone:
        project, _ = await trio.to_thread.run_sync(read_project, spec.path, abandon_on_cancel=True)
    else:
        project = await trio.to_thread.run_sync(read_mounted, spec, abandon_on_cancel=True)
    mounted_as = "" if context.is_alone else spec.name
    memory_limit = context.python_memory_limit
    isolation = Isolation.of(spec.python, is_default=context.isolates_python, memory_limit=memory_limit)
    return await load_project(project, context, isolation=isolation, mounted_as=mounted_as)


async def load_project(
    project: ProjectSpec, context: LoadContext, *, isolation: Isolation | None = None, mounted_as: str = ""
) -> HandlerService:
    """Load a project that has been read; see :func:`load_handler`.

    The handler runs in threads if ``isolation`` is None. ``mounted_as`` is its name in ``handler_config_list``; empty
    if the handler is the only service.
    """
    opened = (
        _open_local(project, context) if isolation is None else _open_isolated(project, context, isolation, mounted_as)
    )
    return await host_service(context.tasks, opened, kind=HandlerSpec.kind, name=project.name)


@asynccontextmanager
async def _open_isolated(
    project: ProjectSpec, context: LoadContext, isolation: Isolation, mounted_as: str
) -> AsyncIterator[HandlerService]:
    limit, hooks = context.make_limit(project.max_concurrency, project.name), context.meters.batches(project.name, "1")
    opening = open_isolated_handler(
        project, isolation, mounted_as=mounted_as, batch_hooks=hooks, queue_timeout=context.queue_timeout
    )
    if project.protobuf_path is None:
        async with opening as handler:
            yield HandlerService(project.name, handler, limit, None, IsolatedModels(handler))
        return
    async with open_project_proto(project) as proto, opening as handler:
        grpc = GrpcProject(proto, handler)
        yield HandlerService(project.name, handler, limit, grpc, IsolatedModels(handler))


@asynccontextmanager
async def _open_local(project: ProjectSpec, context: LoadContext) -> AsyncIterator[HandlerService]:
    _export(project)
    limit, is_alone = context.make_limit(project.max_concurrency, project.name), context.is_alone
    seconds = context.queue_timeout
    batch_hooks = context.meters.batches(project.name, "1")
    async with open_models(project, start_root_span=context.start_root_span) as models:
        if project.protobuf_path is not None:
            loading_rpc = partial(
                open_rpc_handler, clients=models.clients, is_only_service=is_alone, queue_timeout=seconds
            )
            async with open_project_proto(project) as proto, loading_rpc(project, proto) as rpc_handler:
                grpc = GrpcProject(proto, rpc_handler)
                yield HandlerService(project.name, rpc_handler, limit, grpc, models)
            return
        loading = partial(
            open_handler,
            dependencies=HandlerDependencies(models.clients),
            is_only_service=is_alone,
            queue_timeout=seconds,
        )
        async with loading(project, batch_hooks=batch_hooks) as handler:
            yield HandlerService(project.name, handler, limit, None, models)


def _export(project: ProjectSpec) -> None:
    """Export the project's environment to the shared process, without changing existing variables."""
    for name, value in project.environment.items():
        if os.environ.setdefault(name, value) != value:
            log.warning("environment variable already set", handler=project.name, variable=name)


# ----------------------------------------------------------------------
# gRPC method handlers of a project, one for each RPC
# ----------------------------------------------------------------------

_CARDINALITIES: Final = {
    (each.client_streaming, each.server_streaming): each for each in Cardinality.__members__.values()
}


def grpc_handlers(service: Service) -> Mapping[str, Handler]:
    """Return the gRPC handlers of a service by path; empty if it is not a gRPC project."""
    if not isinstance(service, HandlerService) or service.grpc is None:
        return {}
    answer = service.grpc.handler.answer_rpc
    return {
        rpc.path: Handler(
            partial(answer, rpc),
            _CARDINALITIES[rpc.client_streaming, rpc.server_streaming],
            rpc.request_class,
            bytes,
        )
        for rpc in service.grpc.proto.rpcs
    }
