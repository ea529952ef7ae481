"""The REST front end of a data plane as a whole: the application, and the fast lane before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.handlers.http.lane import MountedRoutes
from ovmstrio.api.handlers.http.mounts import HandlerMounts
from ovmstrio.api.infer_lane import InferRoutes
from ovmstrio.server.rest_application import Cors, make_application
from ovmstrio.wire.http.http_server import HttpFrontEnd

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["RestFrontEnd"]


class RestFrontEnd(HttpFrontEnd):
    """Serves a data plane over HTTP/1.1.

    Args:
        plane: what is served.
        addresses: where to listen.
        tls: the server's TLS settings, None for plain connections.
        max_body_bytes: larger bodies are refused.
        cors: what browsers of other origins may do, None for nothing.
        shows_details: whether callers of handlers may see what their code raised.
    """

    def __init__(
        self,
        plane: DataPlane,
        addresses: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = 64 * 2**20,
        cors: Cors | None = None,
        shows_details: bool = False,
    ) -> None:
        mounts = HandlerMounts(plane.registry, shows_details=shows_details)
        application = make_application(plane, max_body_bytes=max_body_bytes, cors=cors, mounts=mounts)
        routes = MountedRoutes(mounts, InferRoutes(plane))
        super().__init__(addresses, routes, application, tls=tls, max_body_bytes=max_body_bytes)
