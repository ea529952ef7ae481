"""A project that is called over gRPC, from its ``.proto`` to its handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.limits import ConcurrencyLimit, LocalLimit
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.runtimes.handlers.grpc.services import UserProto, open_proto
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.project import open_handler

__all__ = ["PASSING", "CallEndedError", "GrpcProject", "WrongReplyError", "open_grpc_project"]


class CallEndedError(Exception):
    """Leaves the handler's code when it has aborted its call, or reads requests of a call that is over.

    It is not logged: the call's status has been said elsewhere.
    """


class WrongReplyError(Exception):
    """A handler gave back what is not a reply of its RPC; that has been logged."""


PASSING: Final = (CallEndedError, WrongReplyError)
"""What passes through a handler's methods as it is."""


@dataclass(frozen=True, slots=True)
class GrpcProject:
    """What a front end serves: the services, the handler with a method for each of their RPCs, and how many at once."""

    proto: UserProto
    handler: LoadedHandler
    limit: ConcurrencyLimit


@asynccontextmanager
async def open_grpc_project(
    project: ProjectSpec,
    *,
    clients: Mapping[str, Any] | None = None,
    limit: ConcurrencyLimit | None = None,
    is_alone: bool = False,
) -> AsyncIterator[GrpcProject]:
    """Compile a project's ``.proto``, load its handler, and keep both while the block runs.

    Args:
        project: has a ``protobuf_path`` and no ``server_side_batching``.
        clients: as for :func:`~ovmstrio.runtimes.handlers.project.open_handler`.
        limit: how many calls may be in flight; by default as many as the project says, in this process.
        is_alone: as for ``open_handler``.

    Raises:
        ConfigError: the ``.proto`` or the handler cannot be used, or they do not fit each other.

    Ownership: as :func:`~ovmstrio.runtimes.handlers.grpc.services.open_proto` and ``open_handler``.
    Cancellation: while anything is compiled or loaded, and at the end as ``open_handler``.
    """
    if project.protobuf_path is None:
        raise ConfigError([Problem("is missing", file=str(project.file), path="protobuf_path")])
    async with (
        open_proto(project.protobuf_path, project.directory) as proto,
        open_handler(
            project,
            clients=clients,
            proto_module=proto.module,
            modules=proto.modules,
            rpc_names=[rpc.name for rpc in proto.rpcs],
            passing=PASSING,
            is_alone=is_alone,
        ) as handler,
    ):
        yield GrpcProject(proto, handler, limit or LocalLimit(project.max_concurrency))
