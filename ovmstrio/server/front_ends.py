"""Factories of the front ends: gRPC, REST, metrics and probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.connection import TrustedProxies
from ovmstrio.protocols.admin.routes import metrics_rules
from ovmstrio.protocols.kserve.rest_routes import health_rules
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.server.rest_front_end import RestFrontEnd
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.http.responses import Cors
from ovmstrio.transport.http.router import Router
from ovmstrio.transport.http.server import HttpFrontEnd

if TYPE_CHECKING:
    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentHistory
    from ovmstrio.transport.send_budget import SendBudget


def grpc_front_end(
    plane: DataPlane, plan: Plan, pending: SendBudget, gate: Gate | None, observer: RequestObserver | None
) -> GrpcFrontEnd:
    """Create the gRPC front end."""
    size = plan.settings.max_message_size
    limits = TransportLimits(max_receive_message_bytes=size, max_send_message_bytes=size)
    remote = plan.settings.allow_remote_admin
    return GrpcFrontEnd(
        plane,
        limits=limits,
        pending=pending,
        root=plan.root,
        allows_remote_admin=remote,
        gate=gate,
        observer=observer,
        trusted_proxies=TrustedProxies.parse(plan.settings.trusted_proxies),
    )


def rest_front_end(
    plane: DataPlane,
    plan: Plan,
    pending: SendBudget,
    gate: Gate | None,
    *,
    past: RecentHistory | None,
    observer: RequestObserver | None,
) -> RestFrontEnd:
    """Create the REST front end."""
    settings = plan.settings
    return RestFrontEnd(
        plane,
        max_body_bytes=settings.max_message_size,
        receive_seconds=settings.request_read_timeout,
        cors=_cors(settings),
        shows_details=settings.debug,
        allows_remote_admin=settings.allow_remote_admin,
        gate=gate,
        observer=observer,
        pending=pending,
        trusted_proxies=TrustedProxies.parse(settings.trusted_proxies),
        root=plan.root,
        openai_errors=settings.openai_errors,
        console=settings.console,
        past=past,
    )


def metrics_front_end(plane: DataPlane, gate: Gate | None) -> HttpFrontEnd:
    """Create the front end of the metrics port."""
    from ovmstrio.ops.http_routes import metrics_router  # noqa: PLC0415 - for pipelines of Ops alone

    return HttpFrontEnd((), metrics_router(plane, metrics_rules(plane), gate))


def probe_front_end(plane: DataPlane) -> HttpFrontEnd:
    """Create the front end of the probe port: liveness and readiness only."""
    return HttpFrontEnd((), Router(health_rules(plane), OvmsRouteErrors()))


def _cors(settings: ServerSettings) -> Cors | None:
    if not settings.allowed_origins:
        return None
    return Cors(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )
