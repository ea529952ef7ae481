"""Front ends: gRPC and REST with the services and routes of all protocols, metrics and probes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict

import trio

from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec
from ovmstrio.console.routes import console_rules, may_open_console
from ovmstrio.core.connection import NO_PROXIES, TrustedProxies
from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.protocols.admin.profile import profile_rules
from ovmstrio.protocols.admin.routes import admin_rules, metrics_rules
from ovmstrio.protocols.anthropic.routes import anthropic_rules
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.grpc_gate import GuardedRoutes, GuardedService
from ovmstrio.protocols.health.dynamic_services import DynamicServices
from ovmstrio.protocols.health.grpc_health import HealthService, OpenEndedCalls, PlaneHealth
from ovmstrio.protocols.health.reflection import ReflectionService
from ovmstrio.protocols.kserve.generate import generate_rules
from ovmstrio.protocols.kserve.grpc_service import InferenceService
from ovmstrio.protocols.kserve.rest_admin import observation_rules, repository_rules, shared_memory_rules
from ovmstrio.protocols.kserve.rest_requests import read_document
from ovmstrio.protocols.kserve.rest_routes import health_rules, kserve_rules
from ovmstrio.protocols.mounts import SelfRoutedMount, ServiceMounts
from ovmstrio.protocols.ollama.routes import ollama_rules
from ovmstrio.protocols.openai.background import BackgroundTasks
from ovmstrio.protocols.openai.files import FileLimits
from ovmstrio.protocols.openai.models import openai_status_fields
from ovmstrio.protocols.openai.routes import openai_rules, route_errors
from ovmstrio.protocols.openai.stored_responses import StoreLimits
from ovmstrio.protocols.openapi.routes import documentation_rules
from ovmstrio.protocols.tensorflow.grpc_service import ModelService, PredictionService
from ovmstrio.protocols.tensorflow.rest_routes import tensorflow_rules
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.http.fast_path import RECEIVE_SECONDS
from ovmstrio.transport.http.responses import Cors
from ovmstrio.transport.http.router import Router, Rule
from ovmstrio.transport.http.server import HttpFrontEnd
from ovmstrio.transport.listeners import AddressFrontEnd
from ovmstrio.transport.statuses import to_grpc_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from ovmstrio.auth.gate import Gate
    from ovmstrio.console.routes import ConsoleMode
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.protocols.mounts import MountKind
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentHistory
    from ovmstrio.transport.grpc.connection import Routes
    from ovmstrio.transport.grpc.server import GrpclibService
    from ovmstrio.transport.listeners import Listener
    from ovmstrio.transport.send_budget import SendBudget

# -- gRPC --------------------------------------------------------------------------------------------------------------


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
            fallback_routes=further,
            limits=limits,
            send_budget=pending,
            observer=observer,
            trusted_proxies=trusted_proxies,
            revocable_streams=None if gate is None else gate.revocable_streams,
            map_error=to_grpc_error,
            count_oversized=lambda: plane.count_rejected(PayloadTooLarge("")),
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


# -- REST --------------------------------------------------------------------------------------------------------------

_MAX_BODY_BYTES: Final = 64 * 2**20


class RestOptions(TypedDict, total=False):
    """Options of the REST routes.

    Attributes:
        shows_details: whether handler exceptions are included in responses.
        allows_remote_admin: whether unauthenticated clients on other machines may change the server.
        root: service mounted at the root of the port, or empty.
        openai_errors: error format of the OpenAI API, ``openai`` or ``ovms``.
        sse_keep_alive_interval: interval of comments in text streams without events, in seconds; 0 for none.
        responses: limits of stored responses.
        files: folder of files and batches, and its limits; None for none.
        console: console access: ``off``, ``local`` or ``on``.
        history: recent history for the console, or None.
    """

    cors: Cors | None
    shows_details: bool
    allows_remote_admin: bool
    gate: Gate | None
    observer: RequestObserver | None
    root: str
    openai_errors: str
    sse_keep_alive_interval: float
    responses: StoreLimits | None
    files: FileLimits | None
    console: ConsoleMode
    history: RecentHistory | None


class RestFrontEnd(HttpFrontEnd):
    """HTTP/1.1 server of a data plane; arguments as for :class:`HttpFrontEnd` and :class:`RestOptions`."""

    def __init__(
        self,
        plane: DataPlane,
        addresses: Sequence[str] = (),
        *,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = _MAX_BODY_BYTES,
        receive_seconds: float = RECEIVE_SECONDS,
        pending: SendBudget | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
        **options: Unpack[RestOptions],
    ) -> None:
        self._background = BackgroundTasks()
        super().__init__(
            addresses,
            make_rest_router(plane, max_body_bytes, background=self._background, **options),
            tls=tls,
            max_body_bytes=max_body_bytes,
            receive_seconds=receive_seconds,
            pending=pending,
            trusted_proxies=trusted_proxies,
        )

    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on open listeners, with a nursery for tasks that outlive their requests."""
        async with self._background.opened():
            await super().serve_listeners(listeners, task_status=task_status)


def make_rest_router(
    plane: DataPlane,
    max_body_bytes: int = _MAX_BODY_BYTES,
    cors: Cors | None = None,
    *,
    shows_details: bool = False,
    allows_remote_admin: bool = False,
    gate: Gate | None = None,
    observer: RequestObserver | None = None,
    root: str = "",
    openai_errors: str = "openai",
    sse_keep_alive_interval: float = 0,
    responses: StoreLimits | None = None,
    files: FileLimits | None = None,
    background: BackgroundTasks | None = None,
    console: ConsoleMode = "local",
    history: RecentHistory | None = None,
) -> Router:
    """Create the router of all protocols and of services with their own paths; options are :class:`RestOptions`.

    ``background`` runs tasks that outlive their requests.
    """
    has_console = partial(may_open_console, "off" if history is None else console)
    changes = AdminChanges(
        allows_remote=allows_remote_admin, origins="" if cors is None else cors.origins, denials=plane.denials
    )
    stored: Any = {"background": background, "responses": responses, "files": files}
    text_rules = partial(_text_rules, plane, max_body_bytes, changes, openai_errors, sse_keep_alive_interval, **stored)
    rules = [
        *kserve_rules(plane, max_body_bytes),
        # A server with a root service has none of these APIs.
        *(() if root else text_rules()),
        *tensorflow_rules(plane, max_body_bytes, partial(openai_status_fields, plane)),
        *generate_rules(plane, max_body_bytes),
        *observation_rules(changes),
        *repository_rules(plane, changes),
        *shared_memory_rules(plane, changes),
        *admin_rules(plane, changes),
        *profile_rules(plane, changes, read_document),
        *documentation_rules(plane, has_root=bool(root), has_console=has_console),
        *(() if history is None else console_rules(plane, changes, history, console, gate)),
    ]
    if not root or plane.render_metrics() is not None:
        # Without server metrics the path belongs to the root service.
        rules += metrics_rules(plane)
    mounts = ServiceMounts(plane, _mount_kinds(plane, max_body_bytes, shows_details=shows_details), root)
    router = Router(
        rules,
        OvmsRouteErrors() if root else route_errors(openai_errors),
        mounts.find,
        cors,
        has_service=plane.has_service,
        has_limits=plane.has_limits,
        gate=gate,
        count_rejected=plane.count_rejected,
        observer=observer,
    )
    plane.registry.subscribe(lambda _: router.forget())
    return router


def _text_rules(
    plane: DataPlane, max_body_bytes: int, changes: AdminChanges, errors: str, keep_alive_seconds: float, **stored: Any
) -> list[Rule]:
    """Return the rules of the APIs of text models; the first ones take precedence on shared paths."""
    return [
        *anthropic_rules(plane, max_body_bytes, keep_alive_seconds),
        *ollama_rules(plane, max_body_bytes),
        *openai_rules(plane, max_body_bytes, changes, errors, keep_alive_seconds=keep_alive_seconds, **stored),
    ]


def _mount_kinds(plane: DataPlane, max_body_bytes: int, *, shows_details: bool) -> dict[str, Callable[[], MountKind]]:
    """Return the kinds of services with their own paths."""
    return {
        **{name: SelfRoutedMount for name, kind in plane.registry.kinds.items() if CallType.HTTP in kind.call_types},
        HandlerSpec.kind: partial(_handlers, shows_details=shows_details),
        OpPipelineSpec.kind: partial(_pipelines_of_ops, plane, max_body_bytes),
    }


def _handlers(*, shows_details: bool) -> MountKind:
    # Separate functions: their imports are only needed by these kinds.
    from ovmstrio.handlers.routes import HandlerMountKind  # noqa: PLC0415 - for who has some

    return HandlerMountKind(shows_details=shows_details)


def _pipelines_of_ops(plane: DataPlane, max_body_bytes: int) -> MountKind:
    from ovmstrio.ops.http_routes import OpsMountKind  # noqa: PLC0415 - as above

    return OpsMountKind(plane, max_body_bytes)


# -- Front ends of a plan ----------------------------------------------------------------------------------------------


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
    history: RecentHistory | None,
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
        sse_keep_alive_interval=settings.sse_keep_alive_interval,
        responses=StoreLimits(settings.response_store_bytes, settings.response_store_seconds),
        files=_file_limits(settings),
        console=settings.console,
        history=history,
    )


def metrics_front_end(plane: DataPlane, gate: Gate | None) -> HttpFrontEnd:
    """Create the front end of the metrics port."""
    from ovmstrio.ops.http_routes import metrics_router  # noqa: PLC0415 - for pipelines of Ops alone

    return HttpFrontEnd((), metrics_router(plane, metrics_rules(plane), gate))


def probe_front_end(plane: DataPlane) -> HttpFrontEnd:
    """Create the front end of the probe port: liveness and readiness only."""
    return HttpFrontEnd((), Router(health_rules(plane), OvmsRouteErrors()))


def _file_limits(settings: ServerSettings) -> FileLimits | None:
    folder = settings.file_store
    limits = settings.file_store_bytes, settings.file_store_files, settings.file_store_seconds
    return None if folder is None else FileLimits(folder, *limits)


def _cors(settings: ServerSettings) -> Cors | None:
    if not settings.allowed_origins:
        return None
    return Cors(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )
