"""``PipelineService.inference``: a unary call whose failures, but overload, are in the answer and not in the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib.const import Cardinality, Handler

from ovmstrio.api.doors import PADDLE_GRPC
from ovmstrio.api.paddle.pipeline_entries import PipelineEntries, answer_of, wrong_name
from ovmstrio.core.errors import InvalidRequest, Overloaded
from ovmstrio.protocol.pipeline_messages import METHOD, decode_request
from ovmstrio.runtimes.ops.messages import from_message, to_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["PipelineService", "host_of"]

_INFERENCE = METHOD.rpartition("/")[2]


class PipelineService:
    """The service over all pipelines of a server, of which a request chooses one by its name.

    Args:
        plane: has the pipelines.
        root: the one that answers nameless requests where there are several; empty for none.
    """

    def __init__(self, plane: DataPlane, root: str = "") -> None:
        self._plane = plane
        self._entries = PipelineEntries(plane.registry, root)

    def __mapping__(self) -> Mapping[str, Handler]:
        """Give the handler by path; both messages come in layouts that are read and written here."""
        return {METHOD: Handler(self._inference, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _inference(self, call: Call) -> None:
        """Answer one request; a client that does not say its address gets that of its connection.

        Raises:
            InvalidRequest: it is no request of a pipeline.
            NotReady: the pipeline is not there yet.
            Overloaded: too many requests wait.

        Cancellation: at any checkpoint; the pipeline gives back what the request held.
        """
        data: bytes = await call.recv_message()
        request = _read(data)
        request.clientip = request.clientip or host_of(call.peer.address)
        name = self._entries.find(request.name)
        if name is None:
            await call.send_message(_written(wrong_name(request)))
            return
        with await self._plane.call(name, PADDLE_GRPC, _INFERENCE, received=len(data)) as observed:
            response = await answer_of(observed, request, call.deadline)
            if response.is_overload:
                raise Overloaded(response.err_msg)
            written = _written(response)
            observed.event.sent = len(written)
            await call.send_message(written)


def host_of(address: str) -> str:
    """Give the host of ``host:port`` or ``[host]:port``."""
    return address.rpartition(":")[0].strip("[]")


def _read(data: bytes) -> PipelineRequest:
    try:
        return from_message(decode_request(data))
    except ValueError as error:
        raise InvalidRequest(f"malformed request of a pipeline: {error}") from None


def _written(response: PipelineResponse) -> bytes:
    written: bytes = to_message(response).SerializeToString()
    return written
