"""Models, handler and front end of a project, one on the other."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.clients import open_clients
from ovmstrio.wire.listeners import tls_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    import trio

    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.clients import Models
    from ovmstrio.runtimes.handlers.concurrency import ConcurrencyLimit
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.wire.listeners import Listener

__all__ = ["FrontEnd", "make_tls", "open_front_end"]

_NOT_READY: Final = "the project cannot be called"


class FrontEnd(Protocol):
    """The connections of one project."""

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = ...
    ) -> None:
        """Serve until drained or cancelled; reports the addresses once connections are accepted."""
        ...

    async def drain(self, grace_seconds: float) -> None:
        """Accept no more, let calls in flight finish within the grace, end the rest."""
        ...


@asynccontextmanager
async def open_front_end(
    project: ProjectSpec, settings: ProjectSettings, limit: ConcurrencyLimit, is_ready: Callable[[], bool]
) -> AsyncIterator[FrontEnd]:
    """Get a project's models, load its handler, and make a front end of it while the block lasts.

    Args:
        project: what to serve; its environment and folder are the process's already.
        settings: of the server.
        limit: how many requests may be in flight.
        is_ready: what is told of the server's health.

    Raises:
        ConfigError: the handler cannot be loaded.
        ExceptionGroup: of what the block raises.

    Ownership: the models, the handler, and the tasks and threads of both.
    Cancellation: at any checkpoint; user code that runs in a thread gets a grace.
    """
    async with open_clients(project) as models:
        open_end = _open_http if project.protobuf_path is None else _open_grpc
        async with open_end(project, models, settings, limit, is_ready) as end:
            yield end


# Each process of a project has one of the two, and does without what the other one needs, such as OpenVINO.


@asynccontextmanager
async def _open_http(
    project: ProjectSpec,
    models: Models,
    settings: ProjectSettings,
    limit: ConcurrencyLimit,
    is_ready: Callable[[], bool],
) -> AsyncIterator[FrontEnd]:
    from ovmstrio.config.specs import HandlerSpec  # noqa: PLC0415
    from ovmstrio.runtimes.handlers.handler_servable import HandlerServable  # noqa: PLC0415
    from ovmstrio.runtimes.handlers.project import open_handler  # noqa: PLC0415
    from ovmstrio.server.lone_service import open_plane_of  # noqa: PLC0415
    from ovmstrio.server.rest_front_end import RestFrontEnd  # noqa: PLC0415

    async with open_handler(project, clients=models.clients, is_alone=True) as handler:
        servable = HandlerServable(project.name, handler, limit, None, models)
        # The handler and its models are closed by the blocks around.
        servable.closed.set()
        spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file)
        async with open_plane_of(spec, servable, lambda: "" if is_ready() else _NOT_READY) as plane:
            yield RestFrontEnd(plane, [], shows_details=settings.debug, root=project.name)


@asynccontextmanager
async def _open_grpc(
    project: ProjectSpec, models: Models, _: ProjectSettings, limit: ConcurrencyLimit, __: Callable[[], bool]
) -> AsyncIterator[FrontEnd]:
    from ovmstrio.project_server.grpc_project import open_grpc_front_end  # noqa: PLC0415
    from ovmstrio.runtimes.handlers.grpc.project import open_grpc_project  # noqa: PLC0415

    async with (
        open_grpc_project(project, clients=models.clients, limit=limit, is_alone=True) as opened,
        open_grpc_front_end(project, opened, models) as end,
    ):
        yield end


def make_tls(project: ProjectSpec, settings: ProjectSettings) -> ssl.SSLContext | None:
    """Make the server's TLS settings, None for plain connections; blocking.

    Raises:
        ConfigError: the files cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    protocol = "http/1.1" if project.protobuf_path is None else "h2"
    try:
        return tls_context(settings.tls_cert, settings.tls_key, settings.client_ca, protocol=protocol)
    except OSError as error:
        files = f"{settings.tls_cert} and {settings.tls_key}"
        raise ConfigError([Problem(f"TLS cannot be set up with {files}: {error.strerror or error}")]) from error
