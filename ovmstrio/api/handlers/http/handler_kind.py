"""Handlers as a kind of service that is called over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.doors import HANDLERS_HTTP
from ovmstrio.api.handlers.http.handler_refusals import refuse, text_to_send
from ovmstrio.api.handlers.http.handler_routes import HandlerRoutes

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.servable import HttpRoutes

__all__ = ["HandlerMountKind"]


class HandlerMountKind:
    """How handlers are mounted.

    Args:
        shows_details: whether callers may see what a handler's code raised.
    """

    door = HANDLERS_HTTP

    def __init__(self, *, shows_details: bool = False) -> None:
        self._shows_details = shows_details

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Give the paths of a handler, whose requests are logged where it has the port for itself."""
        if service.grpc is not None:
            return _CalledOverGrpc(name)
        return HandlerRoutes(
            service.handler,
            service.limit,
            info=service.models.info,
            shows_details=self._shows_details,
            logs_access=is_root,
        )

    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer for an error in text, which pages of any origin may read."""
        return refuse(error)


class _CalledOverGrpc:
    """The paths of a handler that has a gRPC service instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def answer_http(self, request: HttpRequest) -> HttpAnswer:
        """Say how it is called."""
        del request
        return text_to_send(404, f"{self._name} is called over gRPC")
