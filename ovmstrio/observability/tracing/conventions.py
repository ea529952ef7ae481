"""What is told of a call's span: OpenTelemetry's conventions for RPC, HTTP and generative AI, and the server's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.grpc_statuses import GRPC_STATUSES
from ovmstrio.core.peers import Loopback, Remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.events import CallEvent, WireRequest

__all__ = ["describe_call", "describe_end", "is_failing_status", "span_name"]

_SERVERS_FAULT: Final = frozenset(
    GRPC_STATUSES.index(name)
    for name in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_HTTP_SERVERS_FAULT: Final = 500
_SCHEMES: Final = ("http", "https")
_GENERATIVE: Final = "V3"
_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
}
"""What the conventions call a request, by how its path ends."""


def span_name(event: CallEvent) -> str:
    """Name a call: the method of an RPC, what is asked of a text model, or HTTP's method and where it went."""
    request = event.request
    if request is None:
        return f"{event.method} {event.name}"
    operation = _operation(event)
    if operation:
        return f"{operation} {event.name}"
    if request.protocol == "gRPC":
        return request.target.lstrip("/")
    return f"{request.method} {_route(event, request)}"


def describe_call(event: CallEvent, tell: Callable[[str, str | bool | float], None]) -> None:
    """Tell what is known of a call when it starts."""
    tell("ovmstrio.service.name", event.name)
    tell("ovmstrio.service.version", event.version)
    tell("ovmstrio.service.kind", event.kind)
    tell("ovmstrio.api", event.door.api)
    tell("ovmstrio.method", event.method)
    if event.request_id:
        tell("ovmstrio.request.id", event.request_id)
    if (request := event.request) is not None:
        _describe_request(event, request, tell)
    if operation := _operation(event):
        tell("gen_ai.operation.name", operation)
        tell("gen_ai.provider.name", "ovmstrio")
        tell("gen_ai.request.model", event.name)
        tell("gen_ai.response.model", event.name)


def describe_end(event: CallEvent, tell: Callable[[str, str | bool | float], None]) -> None:
    """Tell what came of a call that has ended."""
    tell("ovmstrio.code", event.code)
    if event.caller:
        tell("enduser.id", event.caller)
    if event.queue_seconds:
        tell("ovmstrio.queue.seconds", event.queue_seconds)
    request = event.request
    sent, received = event.sent, event.received
    if request is not None and request.status >= 0:
        if request.protocol == "gRPC":
            tell("rpc.response.status_code", GRPC_STATUSES[request.status])
        else:
            tell("http.response.status_code", request.status)
        sent, received = sent or request.sent, received or request.received
    is_http = request is not None and request.protocol == "HTTP"
    tell("http.request.body.size" if is_http else "rpc.request.size", received)
    tell("http.response.body.size" if is_http else "rpc.response.size", sent)


def is_failing_status(request: WireRequest) -> bool:
    """Tell whether a request was answered with a status that the conventions call an error of the server's."""
    if request.protocol == "gRPC":
        return request.status in _SERVERS_FAULT
    return request.status >= _HTTP_SERVERS_FAULT


def _describe_request(event: CallEvent, request: WireRequest, tell: Callable[[str, str | bool | float], None]) -> None:
    if request.protocol == "gRPC":
        tell("rpc.system.name", "grpc")
        tell("rpc.method", request.target.lstrip("/"))
    else:
        tell("http.request.method", request.method)
        tell("http.route", _route(event, request))
        tell("url.path", request.target.partition("?")[0])
        tell("url.scheme", _scheme(request))
        tell("network.protocol.version", "1.1")
    tell("network.protocol.name", "http")
    client = request.client
    if isinstance(client, Loopback | Remote):
        tell("client.address", client.host)
    if agent := request.header("user-agent"):
        tell("user_agent.original", agent)


def _scheme(request: WireRequest) -> str:
    """Tell what the client has asked for, which may be TLS that ends at a proxy before the server."""
    said = request.header("x-forwarded-proto")
    return said if said in _SCHEMES else "https" if request.is_encrypted else "http"


def _operation(event: CallEvent) -> str:
    if event.door.api != _GENERATIVE or event.request is None:
        return ""
    path = event.request.target.partition("?")[0].rstrip("/")
    return next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "")


def _route(event: CallEvent, request: WireRequest) -> str:
    """Give a path of which there are few: of services with paths of their own only the first part is known."""
    if event.door.api in ("Handlers", "PaddleServing"):
        return f"/{event.name}"
    return request.target.partition("?")[0]
