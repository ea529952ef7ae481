"""``PipelineService.inference``: a unary call whose failures, but overload, are in the answer and not in the status."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from grpclib.const import Cardinality

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import InvalidRequest, NotSupported, Overloaded, ServerError
from ovmstrio.core.service import Service
from ovmstrio.encoding.json_reader import MAX_MEMBERS
from ovmstrio.encoding.messages import METHOD, decode_request, name_in
from ovmstrio.ops.http_routes import note_answer
from ovmstrio.ops.op_service import wrong_name
from ovmstrio.ops.values import PipelineResponse, from_message, to_message
from ovmstrio.serving.early_admission import answer_admitted, keep_place
from ovmstrio.serving.interfaces import PADDLE_GRPC
from ovmstrio.transport.grpc.stream import OrderedHandler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpclib.const import Handler

    from ovmstrio.ops.values import PipelineRequest
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.registry import Registry
    from ovmstrio.transport.grpc.stream import Call

__all__ = ["PipelineService"]


@runtime_checkable
class AnsweringService(Service, Protocol):
    """A loaded pipeline; ``name`` is what its configuration calls it."""

    name: str

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request, whatever comes of it; raises nothing but cancellation."""
        ...


class PipelineEntries:
    """Finds pipelines by the names that requests give.

    Args:
        registry: has them.
        root: the entry that answers nameless requests where there are several; empty for none.
    """

    def __init__(self, registry: Registry, root: str = "") -> None:
        self._registry = registry
        self._root = root

    def find(self, asked: str) -> str | None:
        """Give the entry that has a name, or whose service has it; None if there is none."""
        entries = self._registry.names_of(OpPipelineSpec.kind)
        if asked in entries:
            return asked
        if not asked:
            return self._root if self._root in entries else _only(entries)
        return _only({entry for entry in entries if self._service_name(entry) == asked})

    def _service_name(self, entry: str) -> str:
        try:
            service = self._registry.peek(entry)
        except ServerError:
            return ""
        return service.name if isinstance(service, AnsweringService) else ""


async def answer_of(call: ObservedCall, request: PipelineRequest, deadline: float) -> PipelineResponse:
    """Have a pipeline answer a request, and note in the call's event how that ended.

    Raises:
        NotSupported: it is no pipeline any more.

    Cancellation: at any checkpoint; the pipeline gives back what the request held.
    """
    service = call.service
    if not isinstance(service, AnsweringService):
        raise NotSupported(f'"{call.event.name}" is no pipeline of Ops')
    response = await service.answer(request, deadline)
    note_answer(response)
    return response


def _only(names: frozenset[str] | set[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


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
        return {METHOD: OrderedHandler(self._inference, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _inference(self, call: Call) -> None:
        """Answer one request; a client that does not say its address gets that of its connection.

        Raises:
            InvalidRequest: it is no request of a pipeline.
            NotReady: the pipeline is not there yet.
            Overloaded: too many requests wait.

        Cancellation: at any checkpoint; the pipeline gives back what the request held.
        """
        data: bytes = await call.recv_message()
        named = self._entries.find(name_in(data).decode(errors="replace")) if self._plane.has_limits() else None
        if named is None:
            await self._answer(call, data)
            return
        entry, arrival = named.encode(), call.arrival
        answer = partial(self._answer, call, data, entry)
        await answer_admitted(self._plane, PADDLE_GRPC, entry, answer, method=_INFERENCE, arrival=arrival)

    async def _answer(self, call: Call, data: bytes, entry: bytes = b"") -> None:
        request = _read(data)
        request.clientip = request.clientip or str(call.client)
        name, arrival = self._entries.find(request.name), call.arrival
        if name is None:
            if arrival is not None:
                arrival.settle()
            await call.send_message(_written(wrong_name(request)))
            return
        keep_place(name, entry)
        if arrival is not None:
            arrival.call(name)
        with await self._plane.call(name, PADDLE_GRPC, _INFERENCE, received=len(data)) as observed:
            if arrival is not None:
                await arrival.take_turn()
                arrival.settle()
            response = await answer_of(observed, request, call.deadline)
            if response.is_overload:
                raise Overloaded(response.err_msg)
            written = _written(response)
            observed.event.sent = len(written)
            await call.send_message(written)


def _read(data: bytes) -> PipelineRequest:
    try:
        message = decode_request(data)
    except ValueError as error:
        raise InvalidRequest(f"malformed request of a pipeline: {error}") from None
    for field in ("key", "value", "tensors"):
        if len(getattr(message, field)) > MAX_MEMBERS:
            raise InvalidRequest(f"{field}: expected at most {MAX_MEMBERS}, got {len(getattr(message, field))}")
    return from_message(message)


def _written(response: PipelineResponse) -> bytes:
    written: bytes = to_message(response).SerializeToString()
    return written
