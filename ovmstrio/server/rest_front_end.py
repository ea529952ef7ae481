"""REST front end: routes of all protocols and of services with their own paths."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec
from ovmstrio.console.routes import console_rules
from ovmstrio.core.connection import NO_PROXIES, TrustedProxies
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.protocols.admin.profile import profile_rules
from ovmstrio.protocols.admin.routes import admin_rules, metrics_rules
from ovmstrio.protocols.kserve.generate import generate_rules
from ovmstrio.protocols.kserve.rest_admin import observation_rules, repository_rules, shared_memory_rules
from ovmstrio.protocols.kserve.rest_requests import read_document
from ovmstrio.protocols.kserve.rest_routes import kserve_rules
from ovmstrio.protocols.mounts import SelfRoutedMount, ServiceMounts
from ovmstrio.protocols.openai.models import openai_status_fields
from ovmstrio.protocols.openai.routes import openai_rules
from ovmstrio.protocols.openapi.routes import documentation_rules
from ovmstrio.protocols.tensorflow.rest_routes import tensorflow_rules
from ovmstrio.serving.kind import Takes
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.http.fast_path import RECEIVE_SECONDS
from ovmstrio.transport.http.router import Router
from ovmstrio.transport.http.server import HttpFrontEnd

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from ovmstrio.auth.gate import Gate
    from ovmstrio.console.routes import ConsoleMode
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.protocols.mounts import MountKind
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentHistory
    from ovmstrio.transport.http.responses import Cors
    from ovmstrio.transport.send_budget import SendBudget

_MAX_BODY_BYTES: Final = 64 * 2**20


class RestFrontEnd(HttpFrontEnd):
    """HTTP/1.1 server of a data plane.

    Args:
        shows_details: whether handler exceptions are included in responses.
        allows_remote_admin: whether unauthenticated clients on other machines may change the server.
        pending: send budgets; unlimited by default.
        trusted_proxies: proxies whose forwarding headers are used.
        root: service mounted at the root of the port, or empty.
        openai_errors: error format of the OpenAI API, ``openai`` or ``ovms``.
        console: console access: ``off``, ``local`` or ``on``.
        past: recent history for the console, or None.
    """

    def __init__(
        self,
        plane: DataPlane,
        addresses: Sequence[str] = (),
        *,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = _MAX_BODY_BYTES,
        receive_seconds: float = RECEIVE_SECONDS,
        cors: Cors | None = None,
        shows_details: bool = False,
        allows_remote_admin: bool = False,
        gate: Gate | None = None,
        observer: RequestObserver | None = None,
        pending: SendBudget | None = None,
        trusted_proxies: TrustedProxies = NO_PROXIES,
        root: str = "",
        openai_errors: str = "openai",
        console: ConsoleMode = "local",
        past: RecentHistory | None = None,
    ) -> None:
        router = make_rest_router(
            plane,
            max_body_bytes,
            cors,
            shows_details=shows_details,
            allows_remote_admin=allows_remote_admin,
            gate=gate,
            observer=observer,
            root=root,
            openai_errors=openai_errors,
            console=console,
            past=past,
        )
        super().__init__(
            addresses,
            router,
            tls=tls,
            max_body_bytes=max_body_bytes,
            receive_seconds=receive_seconds,
            pending=pending,
            trusted_proxies=trusted_proxies,
        )


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
    console: ConsoleMode = "local",
    past: RecentHistory | None = None,
) -> Router:
    """Create the router, with arguments as for :class:`RestFrontEnd`."""
    changes = AdminChanges(
        allows_remote=allows_remote_admin, origins="" if cors is None else cors.origins, denials=plane.denials
    )
    rules = [
        *kserve_rules(plane, max_body_bytes),
        # OpenAI's rules precede others on shared paths; a server with a root service has no OpenAI API.
        *(() if root else openai_rules(plane, max_body_bytes, openai_errors)),
        *tensorflow_rules(plane, max_body_bytes, partial(openai_status_fields, plane)),
        *generate_rules(plane, max_body_bytes),
        *observation_rules(changes),
        *repository_rules(plane, changes),
        *shared_memory_rules(plane, changes),
        *admin_rules(plane, changes),
        *profile_rules(plane, changes, read_document),
        *documentation_rules(plane, has_root=bool(root)),
        *(() if past is None else console_rules(plane, changes, past, console, gate)),
    ]
    if not root or plane.render_metrics() is not None:
        # Without server metrics the path belongs to the root service.
        rules += metrics_rules(plane)
    kinds: dict[str, Callable[[], MountKind]] = {
        **{name: SelfRoutedMount for name, kind in plane.registry.kinds.items() if Takes.HTTP in kind.takes},
        HandlerSpec.kind: partial(_handlers, shows_details=shows_details),
        OpPipelineSpec.kind: partial(_pipelines_of_ops, plane, max_body_bytes),
    }
    router = Router(
        rules,
        OvmsRouteErrors(),
        ServiceMounts(plane, kinds, root),
        cors,
        has_limits=plane.has_limits,
        gate=gate,
        observer=observer,
    )
    plane.registry.subscribe(lambda _: router.forget())
    return router


def _handlers(*, shows_details: bool) -> MountKind:
    # Separate functions: their imports are only needed by these kinds.
    from ovmstrio.handlers.routes import HandlerMountKind  # noqa: PLC0415 - for who has some

    return HandlerMountKind(shows_details=shows_details)


def _pipelines_of_ops(plane: DataPlane, max_body_bytes: int) -> MountKind:
    from ovmstrio.ops.http_routes import OpsMountKind  # noqa: PLC0415 - as above

    return OpsMountKind(plane, max_body_bytes)
