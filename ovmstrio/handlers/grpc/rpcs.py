"""gRPC method handlers of a project, one for each RPC."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler

from ovmstrio.handlers.handler_service import HandlerService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.service import Service

_CARDINALITIES: Final = {
    (each.client_streaming, each.server_streaming): each for each in Cardinality.__members__.values()
}


def grpc_handlers(service: Service) -> Mapping[str, Handler]:
    """Return the gRPC handlers of a service by path; empty if it is not a gRPC project."""
    if not isinstance(service, HandlerService) or service.grpc is None:
        return {}
    answer = service.grpc.handler.answer_rpc
    return {
        rpc.path: Handler(
            partial(answer, rpc),
            _CARDINALITIES[rpc.client_streaming, rpc.server_streaming],
            rpc.request_class,
            bytes,
        )
        for rpc in service.grpc.proto.rpcs
    }
