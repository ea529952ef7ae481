"""The gRPC front end as a whole: services, codec and transport put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.frontends.grpc.codec import Codec
from ovmstrio.frontends.grpc.endless_calls import EndlessCalls
from ovmstrio.frontends.grpc.health import HealthService, PlaneHealth
from ovmstrio.frontends.grpc.kserve import InferenceService
from ovmstrio.frontends.grpc.reflection import ReflectionService, service_names
from ovmstrio.frontends.grpc.status_mapping import map_error
from ovmstrio.frontends.grpc.tensorflow import ModelService, PredictionService
from ovmstrio.frontends.grpc.transport.listeners import open_listeners
from ovmstrio.frontends.grpc.transport.server import GrpcServer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.dataplane import DataPlane
    from ovmstrio.frontends.grpc.transport.limits import TransportLimits
    from ovmstrio.frontends.grpc.transport.server import Service
    from ovmstrio.handlers.grpc import GrpcProject

__all__ = ["GrpcFrontEnd"]


class GrpcFrontEnd:
    """Serves a data plane over gRPC: KServe v2, TensorFlow Serving, health checks and reflection.

    Args:
        plane: what is served.
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: the server's TLS settings, None for plain connections.
        limits: what peers may do.
        projects: what else is served: services of users.

    Raises:
        ConfigError: two projects, or a project and the server, have a service of the same name.
    """

    def __init__(
        self,
        plane: DataPlane,
        addresses: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        limits: TransportLimits | None = None,
        projects: Sequence[GrpcProject] = (),
    ) -> None:
        self._addresses = addresses
        self._tls = tls
        self._endless = EndlessCalls()
        names = [service.name for project in projects for service in project.proto.services]
        health = HealthService(PlaneHealth(plane, names), self._endless)
        services: list[Service] = [InferenceService(plane), PredictionService(plane), ModelService(plane), health]
        listed = {*names, *service_names(services)}
        codec = Codec()
        if projects:
            # What only projects need is left alone by those who serve none.
            from ovmstrio.frontends.grpc.handlers.codec import UserCodec  # noqa: PLC0415
            from ovmstrio.frontends.grpc.handlers.projects import user_descriptors, user_services  # noqa: PLC0415

            codec = UserCodec()
            services.append(ReflectionService(listed, self._endless, user_descriptors(projects)))
            services += user_services(projects, service_names(services))
        else:
            services.append(ReflectionService(listed, self._endless))
        self._server = GrpcServer(services, codec, limits=limits, map_error=map_error)

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
            await self._server.serve(listeners, task_status=task_status)

    async def drain(self, grace_seconds: float) -> None:
        """Stop gently: listeners close, calls in flight get the grace, the rest is cancelled with UNAVAILABLE.

        Watches and reflection streams, which would last as long as their clients, end at once.

        Cancellation: leaves the drain where it is; cancel :meth:`serve` to end at once.
        """
        self._endless.end()
        await self._server.drain(grace_seconds)
