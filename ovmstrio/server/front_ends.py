"""The front ends of a server: the protocols that it speaks, over gRPC and HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.server.rest_front_end import RestFrontEnd
from ovmstrio.wire.grpc.limits import TransportLimits

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.server.life import FrontEnd
    from ovmstrio.server.plan import Plan

__all__ = ["grpc_front_end", "metrics_front_end", "rest_front_end"]


def grpc_front_end(plane: DataPlane, plan: Plan) -> FrontEnd:
    """Make what speaks gRPC."""
    size = plan.settings.max_message_size
    limits = TransportLimits(max_receive_message_bytes=size, max_send_message_bytes=size)
    return GrpcFrontEnd(plane, limits=limits, root=plan.root)


def rest_front_end(plane: DataPlane, plan: Plan) -> FrontEnd:
    """Make what speaks HTTP."""
    settings = plan.settings
    return RestFrontEnd(
        plane,
        max_body_bytes=settings.max_message_size,
        cors=_cors(settings),
        shows_details=settings.debug,
        root=plan.root,
    )
