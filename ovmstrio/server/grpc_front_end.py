"""gRPC front end: services, codec and transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.connection import NO_PROXIES, TrustedProxies
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.grpc_gate import GuardedRoutes, GuardedService
from ovmstrio.protocols.health.grpc_health import HealthService, OpenEndedCalls, PlaneHealth
from ovmstrio.protocols.health.hosted_services import DynamicServices
from ovmstrio.protocols.health.reflection import ReflectionService
from ovmstrio.protocols.kserve.grpc_service import InferenceService
from ovmstrio.protocols.tensorflow.grpc_service import ModelService, PredictionService
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.listeners import AddressFrontEnd
from ovmstrio.transport.statuses import to_grpc_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.grpc.connection import Routes
    from ovmstrio.transport.grpc.limits import TransportLimits
    from ovmstrio.transport.grpc.server import GrpclibService
    from ovmstrio.transport.listeners import Listener
    from ovmstrio.transport.send_budget import SendBudget


class GrpcFrontEnd(AddressFrontEnd):
    """gRPC server of a data plane: KServe v2, TensorFlow Serving, health, reflection, and services of users.

    Args:
        addresses: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 is a free port.
        pending: send budgets; unlimited by default.
        root: service for calls without a name, or empty.
        allows_remote_admin: whether unauthenticated clients on other machines may change the server.
        trusted_proxies: proxies whose forwarding metadata is used.
    """

    def __init__(
        self,
        plane: DataPlane,
        addresses: Sequence[str] = (),
        *,
        tls: ssl.SSLContext | None = None,
        limits: TransportLimits | None = None,
        pending: SendBudget | None = None,
        root: str = "",
        allows_remote_admin: bool = False,
        gate: Gate | None = None,
        observer: RequestObserver | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
    ) -> None:
        super().__init__(addresses, tls)
        self._endless = OpenEndedCalls()
        hosted = DynamicServices(plane, root)
        services: list[GrpclibService] = [
            InferenceService(plane, AdminChanges(allows_remote=allows_remote_admin, denials=plane.denials)),
            PredictionService(plane),
            ModelService(plane),
            HealthService(PlaneHealth(plane, hosted), self._endless),
        ]
        services.append(ReflectionService(services, hosted, self._endless))
        further: Routes = hosted
        if gate is not None and gate.guards_everything:
            services = [GuardedService(service, gate) for service in services]
            further = GuardedRoutes(hosted, gate)
        self._server = GrpcServer(
            services,
            Codec(),
            further=further,
            limits=limits,
            pending=pending,
            observer=observer,
            trusted_proxies=trusted_proxies,
            map_error=to_grpc_error,
        )

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self._server.connections)

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve as :meth:`serve` with listeners of the caller."""
        await self._server.serve(listeners, task_status=task_status)

    def begin_drain(self) -> None:
        """Do nothing: GOAWAY would end the connections, and there may be no other server yet."""

    async def drain(self, grace_seconds: float) -> int:
        """Close the listeners, wait for running calls, cancel the rest and return their number.

        Health watches and reflection streams end at once, as they last as long as their clients.
        """
        self._endless.end()
        return await self._server.drain(grace_seconds)
