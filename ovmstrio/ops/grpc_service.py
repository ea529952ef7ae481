"""Paddle Serving's gRPC ``PipelineService`` for Op pipelines.

Errors other than overload are in the response, not in the gRPC status.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from grpclib.const import Cardinality

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import InvalidRequest, NotSupported, Overloaded, ServerError
from ovmstrio.encoding.json_reader import MAX_MEMBERS
from ovmstrio.encoding.messages import METHOD, decode_request, name_in
from ovmstrio.ops.http_routes import record_failure
from ovmstrio.ops.messages import PipelineResponse, request_from_message, response_to_message
from ovmstrio.ops.op_service import OpService, unknown_service_response
from ovmstrio.serving.admission import release_unless_named
from ovmstrio.serving.interfaces import PADDLE_GRPC
from ovmstrio.transport.grpc.call import OrderedHandler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpclib.const import Handler

    from ovmstrio.ops.messages import PipelineRequest
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.registry import Registry
    from ovmstrio.transport.grpc.call import Call


class PipelineEntries:
    """Lookup of pipelines by request name; ``root`` serves requests without a name if there are several."""

    def __init__(self, registry: Registry, root: str = "") -> None:
        self._registry = registry
        self._root = root

    def find(self, request_name: str) -> str | None:
        """Return the entry with the name or with a service of that name; None if unknown or ambiguous."""
        entries = self._registry.names_of(OpPipelineSpec.kind)
        if request_name in entries:
            return request_name
        if not request_name:
            return self._root if self._root in entries else _only(entries)
        return _only({entry for entry in entries if self._service_name(entry) == request_name})

    def _service_name(self, entry: str) -> str:
        try:
            service = self._registry.peek(entry)
        except ServerError:
            return ""
        return service.name if isinstance(service, OpService) else ""


async def run_pipeline(call: ObservedCall, request: PipelineRequest, deadline: float) -> PipelineResponse:
    """Run a request on a call's pipeline and record its failure in the event; NotSupported for other services."""
    service = call.service
    if not isinstance(service, OpService):
        raise NotSupported(f'"{call.event.name}" is not an Op pipeline')
    response = await service.answer(request, deadline)
    record_failure(response)
    return response


def _only(names: frozenset[str] | set[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


_INFERENCE = METHOD.rpartition("/")[2]


class PipelineService:
    """gRPC service over all pipelines of a server; ``root`` serves requests without a name if there are several."""

    def __init__(self, plane: DataPlane, root: str = "") -> None:
        self._plane = plane
        self._entries = PipelineEntries(plane.registry, root)

    def __mapping__(self) -> Mapping[str, Handler]:
        return {METHOD: OrderedHandler(self._inference, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _inference(self, call: Call) -> None:
        data: bytes = await call.recv_message()
        entry_name = self._entries.find(name_in(data).decode(errors="replace")) if self._plane.has_limits() else None
        if entry_name is None:
            await self._answer(call, data)
            return
        entry, arrival = entry_name.encode(), call.arrival
        answer = partial(self._answer, call, data, entry)
        await self._plane.call_admitted(PADDLE_GRPC, entry, answer, method=_INFERENCE, arrival=arrival)

    async def _answer(self, call: Call, data: bytes, entry: bytes = b"") -> None:
        request = _read(data)
        request.clientip = request.clientip or str(call.client)
        name, arrival = self._entries.find(request.name), call.arrival
        if name is None:
            if arrival is not None:
                arrival.settle()
            await call.send_message(_encode(unknown_service_response(request)))
            return
        release_unless_named(name, entry)
        if arrival is not None:
            arrival.call(name)
        with await self._plane.call(name, PADDLE_GRPC, _INFERENCE, received=len(data)) as observed:
            if arrival is not None:
                await arrival.take_turn()
                arrival.settle()
            response = await run_pipeline(observed, request, call.deadline)
            if response.is_overload:
                raise Overloaded(response.err_msg)
            encoded = _encode(response)
            observed.event.sent = len(encoded)
            await call.send_message(encoded)


def _read(data: bytes) -> PipelineRequest:
    try:
        message = decode_request(data)
    except ValueError as error:
        raise InvalidRequest(f"malformed pipeline request: {error}") from None
    for field in ("key", "value", "tensors"):
        if len(getattr(message, field)) > MAX_MEMBERS:
            raise InvalidRequest(f"{field}: expected at most {MAX_MEMBERS}, got {len(getattr(message, field))}")
    return request_from_message(message)


def _encode(response: PipelineResponse) -> bytes:
    encoded: bytes = response_to_message(response).SerializeToString()
    return encoded
