"""The front ends of a server: the protocols that it speaks, over gRPC and HTTP, and what scrapers have alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ovmstrio.core.pending_answers import PendingAnswers
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.server.memory_limit import memory_limit
from ovmstrio.server.rest_front_end import RestFrontEnd
from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.http.answers import Cors
from ovmstrio.wire.http.http_server import HttpFrontEnd

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.settings import ServerSettings

__all__ = ["grpc_front_end", "metrics_front_end", "pending_answers", "rest_front_end"]


_PART_OF_MEMORY: Final = 4


def pending_answers(settings: ServerSettings, processes: int = 1) -> PendingAnswers:
    """Make what counts the answers that wait for clients, for one of several processes that share the memory."""
    quota = settings.grpc_memory_quota or memory_limit() // _PART_OF_MEMORY
    return PendingAnswers(
        quota / processes if quota else math.inf,
        settings.max_pending_response_bytes,
        settings.stalled_client_seconds,
    )


def grpc_front_end(plane: DataPlane, plan: Plan, pending: PendingAnswers) -> GrpcFrontEnd:
    """Make what speaks gRPC."""
    size = plan.settings.max_message_size
    limits = TransportLimits(max_receive_message_bytes=size, max_send_message_bytes=size)
    remote = plan.settings.allow_remote_admin
    return GrpcFrontEnd(plane, limits=limits, pending=pending, root=plan.root, allows_remote_admin=remote)


def rest_front_end(plane: DataPlane, plan: Plan, pending: PendingAnswers) -> RestFrontEnd:
    """Make what speaks HTTP."""
    settings = plan.settings
    return RestFrontEnd(
        plane,
        max_body_bytes=settings.max_message_size,
        receive_seconds=settings.request_receive_seconds,
        cors=_cors(settings),
        shows_details=settings.debug,
        allows_remote_admin=settings.allow_remote_admin,
        pending=pending,
        root=plan.root,
    )


def metrics_front_end(plane: DataPlane) -> HttpFrontEnd:
    """Make what answers scrapers at a port of their own."""
    from ovmstrio.api.paddle.http.pipeline_routes import metrics_router  # noqa: PLC0415 - for pipelines of Ops alone

    return HttpFrontEnd((), metrics_router(plane))


def _cors(settings: ServerSettings) -> Cors | None:
    if not settings.allowed_origins:
        return None
    return Cors(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )
