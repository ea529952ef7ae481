"""``PipelineService.inference``: a unary call whose failures, but overload, are in the answer and not in the status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grpclib.const import Cardinality, Handler

from ovmstrio.core.errors import InvalidRequest, Overloaded
from ovmstrio.protocol.pipeline_messages import METHOD, decode_request
from ovmstrio.runtimes.ops.messages import from_message, to_message
from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.runtimes.ops.op_service import OpService
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["PIPELINE_DECODERS", "PIPELINE_ENCODERS", "PipelineService", "host_of"]


class PipelineService:
    """The service over one pipeline."""

    def __init__(self, service: OpService) -> None:
        self._pipeline = service

    def __mapping__(self) -> Mapping[str, Handler]:
        """Give the handler by path."""
        return {METHOD: Handler(self._inference, Cardinality.UNARY_UNARY, PipelineRequest, PipelineResponse)}

    async def _inference(self, call: Call) -> None:
        """Answer one request; a client that does not say its address gets that of its connection.

        Raises:
            Overloaded: too many requests wait.

        Cancellation: at any checkpoint; the pipeline gives back what the request held.
        """
        request: PipelineRequest = await call.recv_message()
        if not request.clientip:
            request.clientip = host_of(call.peer.address)
        response = await self._pipeline.answer(request, call.deadline)
        if response.is_overload:
            raise Overloaded(response.err_msg)
        await call.send_message(response)


def host_of(address: str) -> str:
    """Give the host of ``host:port`` or ``[host]:port``."""
    return address.rpartition(":")[0].strip("[]")


def _decode(data: bytes) -> PipelineRequest:
    try:
        return from_message(decode_request(data))
    except ValueError as error:
        raise InvalidRequest(f"malformed request of a pipeline: {error}") from None


def _encode(response: PipelineResponse) -> bytes:
    encoded: bytes = to_message(response).SerializeToString()
    return encoded


PIPELINE_DECODERS: Final[Mapping[type, Callable[[bytes], Any]]] = {PipelineRequest: _decode}
PIPELINE_ENCODERS: Final[Mapping[type, Callable[[Any], bytes]]] = {PipelineResponse: _encode}
