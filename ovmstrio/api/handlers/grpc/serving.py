"""The gRPC front end of projects that are served alone, without the models and graphs of a whole server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.api.grpc_standard.endless_calls import EndlessCalls
from ovmstrio.api.grpc_standard.health import HealthService
from ovmstrio.api.grpc_standard.reflection import ReflectionService, service_names
from ovmstrio.api.grpc_standard.services_front_end import ServicesFrontEnd
from ovmstrio.api.handlers.grpc.codec import UserCodec
from ovmstrio.api.handlers.grpc.health import ProjectsHealth
from ovmstrio.api.handlers.grpc.projects import user_descriptors, user_services
from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.grpc.server import GrpcServer
from ovmstrio.wire.status_mapping import map_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.runtimes.handlers.grpc import GrpcProject
    from ovmstrio.wire.grpc.server import Service

__all__ = ["HANDLER_LIMITS", "HandlerGrpcFrontEnd"]

_LARGEST_MESSAGE: Final = 2**31 - 1
"""What protobuf itself can read and write."""
HANDLER_LIMITS: Final = TransportLimits(
    max_receive_message_bytes=_LARGEST_MESSAGE, max_send_message_bytes=_LARGEST_MESSAGE
)
"""What peers of such a server may do unless something else is said: send and get messages of any size."""


class HandlerGrpcFrontEnd(ServicesFrontEnd):
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
        endless = EndlessCalls()
        names = [service.name for project in projects for service in project.proto.services]
        self._health = ProjectsHealth(names)
        health = HealthService(self._health, endless)
        reflection = ReflectionService({*names, *service_names([health])}, endless, user_descriptors(projects))
        services: list[Service] = [health, reflection, *user_services(projects, service_names([health, reflection]))]
        server = GrpcServer(services, UserCodec(), limits=limits, map_error=map_error)
        super().__init__(server, addresses, endless, tls)

    async def drain(self, grace_seconds: float) -> None:
        """Say that nothing is served any more, and stop gently as all front ends do.

        Cancellation: as theirs.
        """
        self._health.end()
        await super().drain(grace_seconds)
