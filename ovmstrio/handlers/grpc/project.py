"""Projects called over gRPC: compiled ``.proto`` and handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.grpc.call import NON_FAILURES, RpcCall
from ovmstrio.handlers.grpc.proto_compiler import Rpc, UserProto, open_proto
from ovmstrio.handlers.handler_loading import HandlerDependencies, LoadedHandler, open_handler


class RpcHandler(Protocol):
    """Handler called over gRPC, in this process or in worker processes."""

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer one call.

        Raises:
            GRPCError: the handler failed, set a status or returned an invalid reply, or a request cannot be read.
            ServerError: raised by the handler.

        Cancellation: at any checkpoint; a generator is closed after its current step.
        """
        ...


@dataclass(frozen=True, slots=True)
class GrpcProject:
    """Services of a project and the handler with a method for each RPC."""

    proto: UserProto
    handler: RpcHandler


@asynccontextmanager
async def open_rpc_handler(
    project: ProjectSpec,
    proto: UserProto,
    *,
    clients: Mapping[str, Any] | None = None,
    is_only_service: bool = False,
    error_reporter: ErrorReporter | None = None,
    queue_timeout: float = 0,
) -> AsyncIterator[LoadedHandler]:
    """Load a handler with a method for each RPC of its services; see ``open_handler``."""
    supplies = HandlerDependencies(clients or {}, proto.module, proto.modules, tuple(rpc.name for rpc in proto.rpcs))
    error_reporter = error_reporter or ErrorReporter(project.name, project.directory, NON_FAILURES)
    async with open_handler(
        project, supplies, is_only_service=is_only_service, error_reporter=error_reporter, queue_timeout=queue_timeout
    ) as handler:
        yield handler


def open_project_proto(project: ProjectSpec) -> AbstractAsyncContextManager[UserProto]:
    """Compile a project's ``.proto``; see :func:`~ovmstrio.handlers.grpc.proto_compiler.open_proto`."""
    if project.protobuf_path is None:
        raise ConfigError([Problem("key is missing", file=str(project.file), path="protobuf_path")])
    return open_proto(project.protobuf_path, project.directory)
