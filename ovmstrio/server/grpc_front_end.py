"""The gRPC front end as a whole: services, codec and transport put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.grpc_codec import Codec
from ovmstrio.api.grpc_standard.endless_calls import EndlessCalls
from ovmstrio.api.grpc_standard.health import HealthService, PlaneHealth
from ovmstrio.api.grpc_standard.reflection import ReflectionService, service_names
from ovmstrio.api.grpc_standard.services_front_end import ServicesFrontEnd
from ovmstrio.api.kserve.grpc.inference_service import InferenceService
from ovmstrio.api.tensorflow.grpc import ModelService, PredictionService
from ovmstrio.wire.grpc.server import GrpcServer
from ovmstrio.wire.status_mapping import map_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.runtimes.handlers.grpc import GrpcProject
    from ovmstrio.wire.grpc.limits import TransportLimits
    from ovmstrio.wire.grpc.server import Service

__all__ = ["GrpcFrontEnd"]


class GrpcFrontEnd(ServicesFrontEnd):
    """Serves a data plane over gRPC: KServe v2, TensorFlow Serving, health checks and reflection.

    Args:
        plane: what is served.
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: the server's TLS settings, None for plain connections.
        limits: what peers may do.
        projects: what else is served: services of users.
        services: hosted beside those of the data plane.
        codec: knows their messages, too.

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
        services: Sequence[Service] = (),
        codec: Codec | None = None,
    ) -> None:
        endless = EndlessCalls()
        names = [service.name for project in projects for service in project.proto.services]
        health = HealthService(PlaneHealth(plane, names), endless)
        hosted: list[Service] = [
            InferenceService(plane),
            PredictionService(plane),
            ModelService(plane),
            health,
            *services,
        ]
        listed = {*names, *service_names(hosted)}
        if projects:
            # What only projects need is left alone by those who serve none.
            from ovmstrio.api.handlers.grpc.codec import UserCodec  # noqa: PLC0415
            from ovmstrio.api.handlers.grpc.projects import user_descriptors, user_services  # noqa: PLC0415

            codec = codec or UserCodec()
            hosted.append(ReflectionService(listed, endless, user_descriptors(projects)))
            hosted += user_services(projects, service_names(hosted))
        else:
            hosted.append(ReflectionService(listed, endless))
        server = GrpcServer(hosted, codec or Codec(), limits=limits, map_error=map_error)
        super().__init__(server, addresses, endless, tls)
