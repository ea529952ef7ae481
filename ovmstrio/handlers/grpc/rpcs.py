"""The services of one project, each RPC bound to the handler's method of its name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler

from ovmstrio.handlers.handler_service import HandlerServable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.service import Service
    from ovmstrio.handlers.grpc.project import GrpcProject
    from ovmstrio.handlers.grpc.services import Rpc
    from ovmstrio.transport.grpc.stream import Call

__all__ = ["handlers_of"]

_CARDINALITIES: Final = {
    (each.client_streaming, each.server_streaming): each for each in Cardinality.__members__.values()
}


def handlers_of(service: Service) -> Mapping[str, Handler]:
    """Give what answers the calls of a loaded handler's services, by path."""
    if not isinstance(service, HandlerServable) or service.grpc is None:
        return {}
    rpcs = _HandlerRpcs(service.grpc)
    return {
        rpc.path: Handler(
            partial(rpcs.run, rpc),
            _CARDINALITIES[rpc.client_streaming, rpc.server_streaming],
            rpc.request_class,
            bytes,
        )
        for rpc in service.grpc.proto.rpcs
    }


class _HandlerRpcs:
    """The RPCs of one project, which its handler has a method for each of."""

    def __init__(self, project: GrpcProject) -> None:
        self._handler = project.handler

    async def run(self, rpc: Rpc, call: Call) -> None:
        """Answer one call.

        Raises:
            GRPCError: the handler failed, ended the call with a status, or gave back something wrong; or a request
                cannot be read.
            ServerError: the handler met an error of the server's that is fit for callers.

        Ownership: the tasks that feed the handler with requests and look after its context.
        Cancellation: at any checkpoint; a generator is closed after the step that it is in.
        """
        await self._handler.answer_rpc(rpc, call)
