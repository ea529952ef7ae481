"""The gRPC front end of projects that are served alone, without the models and graphs of a whole server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.frontends.grpc.endless_calls import EndlessCalls
from ovmstrio.frontends.grpc.handlers.codec import UserCodec
from ovmstrio.frontends.grpc.handlers.health import ProjectsHealth
from ovmstrio.frontends.grpc.handlers.projects import user_descriptors, user_services
from ovmstrio.frontends.grpc.health import HealthService
from ovmstrio.frontends.grpc.reflection import ReflectionService, service_names
from ovmstrio.frontends.grpc.status_mapping import map_error
from ovmstrio.frontends.grpc.transport.limits import TransportLimits
from ovmstrio.frontends.grpc.transport.listeners import open_listeners
from ovmstrio.frontends.grpc.transport.server import GrpcServer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.frontends.grpc.transport.listeners import Listener
    from ovmstrio.frontends.grpc.transport.server import Service
    from ovmstrio.handlers.grpc import GrpcProject

__all__ = ["HANDLER_LIMITS", "HandlerGrpcFrontEnd"]

_LARGEST_MESSAGE: Final = 2**31 - 1
"""What protobuf itself can read and write."""
HANDLER_LIMITS: Final = TransportLimits(
    max_receive_message_bytes=_LARGEST_MESSAGE, max_send_message_bytes=_LARGEST_MESSAGE
)
"""What peers of such a server may do unless something else is said: send and get messages of any size."""


class HandlerGrpcFrontEnd:
    """Serves projects over gRPC: their services, health checks and reflection.

    Args:
        projects: what is served.
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: the server's TLS settings, None for plain connections.
        limits: what peers may do.

    Raises:
        ConfigError: two services have the same name.
    """

    def __init__(
        self,
        projects: Sequence[GrpcProject],
        addresses: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        limits: TransportLimits = HANDLER_LIMITS,
    ) -> None:
        self._addresses = addresses
        self._tls = tls
        self._endless = EndlessCalls()
        names = [service.name for project in projects for service in project.proto.services]
        self._health = ProjectsHealth(names)
        health = HealthService(self._health, self._endless)
        reflection = ReflectionService({*names, *service_names([health])}, self._endless, user_descriptors(projects))
        services: list[Service] = [health, reflection, *user_services(projects, service_names([health, reflection]))]
        self._server = GrpcServer(services, UserCodec(), limits=limits, map_error=map_error)

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until :meth:`drain` has ended the last connection; may be run once.

        Reports the addresses that are bound once connections are accepted.

        Ownership: listeners, connections and calls.  A failing connection or call ends nothing but itself.

        Raises:
            ValueError: an address is not understood.
            OSError: an address cannot be bound.

        Cancellation: closes everything at once.
        """
        async with open_listeners(self._addresses, self._tls) as listeners:
            await self.serve_listeners(listeners, task_status=task_status)

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do as :meth:`serve` with listeners that are the caller's."""
        await self._server.serve(listeners, task_status=task_status)

    async def drain(self, grace_seconds: float) -> None:
        """Stop gently: listeners close, calls in flight get the grace, the rest is cancelled with UNAVAILABLE.

        Watches and reflection streams, which would last as long as their clients, end at once.

        Cancellation: leaves the drain where it is; cancel :meth:`serve` to end at once.
        """
        self._health.end()
        self._endless.end()
        await self._server.drain(grace_seconds)
