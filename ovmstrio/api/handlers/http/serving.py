"""The HTTP front end of a project alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.handlers.http.application import make_project_application
from ovmstrio.api.handlers.http.lane import ProjectRoutes
from ovmstrio.wire.http.http_server import HttpFrontEnd

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.api.handlers.http.service import HandlerService

__all__ = ["HandlerFrontEnd"]


class HandlerFrontEnd(HttpFrontEnd):
    """Serves a handler at ``/``.

    Args:
        service: the handler.
        addresses: where to listen, as for :class:`HttpFrontEnd`.
        info: what ``/info`` tells.
        is_ready: what ``/v2/health/ready`` tells.
        tls: the server's TLS settings, None for plain connections.
    """

    def __init__(
        self,
        service: HandlerService,
        addresses: Sequence[str],
        *,
        info: Callable[[], Mapping[str, Any]],
        is_ready: Callable[[], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        application = make_project_application(service, info, is_ready)
        super().__init__(addresses, ProjectRoutes(service), application, tls=tls)
