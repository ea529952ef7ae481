"""gRPC servicers for Ray's proxies, which forward messages as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from ovmstrio.cluster.ray.grpc_paths import CALLS, STREAM

if TYPE_CHECKING:
    from collections.abc import Callable


def add_services(servicer: Any, server: Any) -> None:
    """Add the calls to a server of Ray, which replaces the handlers by its own."""
    services: dict[str, dict[str, Any]] = {}
    for path in (*CALLS, STREAM):
        _, service, method = path.split("/")
        make: Callable[..., Any] = (
            grpc.stream_stream_rpc_method_handler if path == STREAM else grpc.unary_unary_rpc_method_handler
        )
        services.setdefault(service, {})[method] = make(getattr(servicer, method))
    for service, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
