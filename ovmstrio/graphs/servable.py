"""A loaded graph as a servable: an instance for each call, and one for each stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import DeadlineExceeded, Gathered, GraphFailure, InvalidRequest, NotSupported, ServerError
from ovmstrio.core.generation import GenerationLimits, Task
from ovmstrio.core.request import InferRequest, InferResponse, ParameterValue, ServableMetadata, StreamProblem
from ovmstrio.core.service import Inside, PayloadDocument
from ovmstrio.core.tensor import INVALID, RawTensor, TensorSpec
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, USER_DOCUMENT, parse_as_python, read_json
from ovmstrio.graphs.calculator import InstanceContext
from ovmstrio.graphs.chat import SaidMaker, generate_text, no_chat
from ovmstrio.graphs.instance import (
    GRAPH_VERSION,
    AllPackets,
    FirstPackets,
    GraphInstance,
    Replies,
    ResponseMaker,
    running,
    to_output,
)
from ovmstrio.graphs.packets import REQUEST_PAYLOAD, AutomaticTimestamps
from ovmstrio.graphs.plan import draw
from ovmstrio.graphs.requests import RequestReader, graph_failure, side_packets, timestamp_of
from ovmstrio.util.slices import run_to_end
from pyovms import HttpPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Protocol

    from ovmstrio.core.generation import Generation, GenerationRequest
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.service import Documents, InferStream
    from ovmstrio.graphs.graph_config import StreamRef
    from ovmstrio.graphs.instance import Sink
    from ovmstrio.graphs.packets import Packet
    from ovmstrio.graphs.plan import LoadedGraph
    from ovmstrio.util.drawing import Drawing

__all__ = ["REPLIES_BUFFERED", "GraphServable", "GraphStream", "document_of", "open_documents"]

# ----------------------------------------------------------------------
# The requests of one stream: their checks, their timestamps, and their way into the instance
# ----------------------------------------------------------------------

_T = TypeVar("_T")

REPLIES_BUFFERED: Final = 32
"""Replies that may wait for the front end before the nodes that make them do."""

_VERSIONS: Final = frozenset({"1", "0", ""})
_WRONG_NAME: Final = "Subsequent request with incorrect servable name"
_WRONG_VERSION: Final = "Subsequent request with incorrect servable version"


class GraphStream(Generic[_T]):
    """One open stream of a graph; the ``InferStream`` that front ends use, where its replies are responses."""

    def __init__(
        self,
        instance: GraphInstance,
        sink: Replies[_T],
        replies: trio.MemoryReceiveChannel[_T | StreamProblem],
        *,
        reader: RequestReader,
        timestamps: AutomaticTimestamps,
    ) -> None:
        self.replies = replies
        self._instance = instance
        self._sink = sink
        self._reader = reader
        self._timestamps = timestamps

    async def receive(self) -> _T | None:
        """Give the next reply; None behind the last one.

        Raises:
            InvalidRequest: a request of the stream cannot be read.
            ServerError: the graph has failed; leaving the block that opened the stream raises it again.

        Cancellation: while there is none; nothing is lost.
        """
        try:
            reply = await self.replies.receive()
        except trio.EndOfChannel:
            if self._instance.failure is not None:
                raise self._instance.failure from None
            return None
        if isinstance(reply, StreamProblem):
            raise InvalidRequest(reply.message)
        return reply

    async def send(self, request: InferRequest) -> None:
        """Take in one more request; what is wrong with it alone becomes a problem among the replies.

        Raises:
            trio.BrokenResourceError: the graph has ended.

        Cancellation: while queues or the replies are full; the request may have been taken in part.
        """
        if request.model_name != self._instance.context.graph:
            await self._refuse(f"{_WRONG_NAME}; validate subsequent requests")
        elif request.model_version not in _VERSIONS:
            await self._refuse(f"{_WRONG_VERSION}; validate subsequent requests")
        else:
            await self.take(request, "partial deserialization of subsequent requests")
            if self._instance.is_finished:
                raise trio.BrokenResourceError("the graph has ended")

    def end(self) -> None:
        """Say that no request will follow; what is under way goes on to its end."""
        self._instance.close_inputs()
        self._instance.dispatch()

    async def take(self, request: InferRequest, context: str, packets: Iterable[tuple[str, Any]] | None = None) -> None:
        """Take in a request of this graph; ``context`` ends what is told of one that is wrong.

        With ``packets`` these come in, by the names of inputs, in the place of the request's own.

        Cancellation: as :meth:`send`.
        """
        instance = self._instance
        instance.context.request_id = request.id
        try:
            given = timestamp_of(request)
            timestamp = self._timestamps.next() if given is None else given
            for name, value in self._reader.packets(request) if packets is None else packets:
                await instance.push(name, value, timestamp)
        except ServerError as error:
            instance.dispatch()
            await self._refuse(f"{error.message}; {context}")
        except trio.BrokenResourceError:
            # The instance knows why, and the end of the stream tells it.
            return
        instance.dispatch()

    async def _refuse(self, message: str) -> None:
        if not self._sink.reply(StreamProblem(message)):
            await self._sink.wait_room()


# ----------------------------------------------------------------------
# A request over HTTP as the only packet of a graph's input, and packets of its output as documents
# ----------------------------------------------------------------------

if TYPE_CHECKING:

    class OpenDocuments(Protocol):
        """Opens a stream of a graph that gives documents; see ``GraphServable``."""

        def __call__(
            self, first: InferRequest, *, packets: Sequence[tuple[str, Any]], http: HttpRequest
        ) -> AbstractAsyncContextManager[GraphStream[PayloadDocument]]:
            """Open it with packets in the place of those of a request, which is ``http``."""
            ...


_BINARY = "application/octet-stream"


@asynccontextmanager
async def open_documents(
    graph: str, name: str, open_: OpenDocuments, request: HttpRequest, deadline: float
) -> AsyncIterator[Documents]:
    """Have a graph answer a request that comes in by its input ``name``; see ``PayloadService.open_payload``."""
    first = InferRequest(graph, id=request.header("x-request-id") or "", deadline=deadline)
    is_left = False
    with trio.CancelScope(deadline=deadline) as scope:
        try:
            async with open_(first, packets=[(name, _payload(name, request))], http=request) as stream:
                stream.end()
                yield stream
                is_left = True
        except ServerError:
            # The reader has been told, or wants no more.
            if not is_left:
                raise
    if scope.cancelled_caught:
        raise DeadlineExceeded("the deadline passed before the graph had answered")


def _payload(name: str, request: HttpRequest) -> HttpPayload:
    headers: dict[str, str] = {}
    for key, value in request.headers:
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    head = (request.method, request.target, headers, request.client.host)
    return HttpPayload._received(name, request.body, head, _parse)  # noqa: SLF001 - pyovms's own for the server


def _parse(body: bytes) -> Any:
    """Parse JSON in the thread of user code, in slices so that the event loop runs meanwhile."""
    if len(body) <= AT_ONCE_BYTES:
        return json.loads(body)
    return run_to_end(read_json(body, USER_DOCUMENT, parse=parse_as_python))


def document_of(_: int, packet: Packet) -> PayloadDocument:
    """Make a document of a packet, whose datatype is the type of its content; other tensors are bytes.

    Raises:
        GraphFailure: it is no tensor of a Python node.
    """
    made = to_output("payload", packet.value)
    if not isinstance(made, RawTensor):
        raise graph_failure(f"expected a dict, str, bytes or pyovms.Tensor as an answer, got {type(made).__name__}")
    return PayloadDocument(bytes(made.data), made.datatype if "/" in made.datatype else _BINARY)


# ----------------------------------------------------------------------
# A loaded graph as a servable: an instance for each call, and one for each stream
# ----------------------------------------------------------------------

_PLATFORM: Final = "OpenVINO"
_NOT_ALL_INPUTS: Final = "Invalid number of inputs - Not all input packets created"
_NO_PARAMETERS: Final[Mapping[str, ParameterValue]] = MappingProxyType({})
_NO_OUTPUT: Final = "Mediapipe execution failed. MP status - Unknown error during mediapipe execution"


class GraphServable:
    """One loaded graph.

    Args:
        name: under which it is served.
        loaded: the plan and everything that its instances share; owned from now on.
        hooks: are told of instances.
    """

    def __init__(self, name: str, loaded: LoadedGraph, hooks: GraphHooks) -> None:
        self.name = name
        self._loaded = loaded
        self._plan = loaded.plan
        self._hooks = hooks
        config = loaded.plan.config
        self._reader = RequestReader(config.inputs)
        self._timestamps = AutomaticTimestamps()
        self.metadata = ServableMetadata(name, _PLATFORM, _describe(config.inputs), _describe(config.outputs))

    @cached_property
    def _drawing(self) -> Drawing:
        return draw(self._plan.config)

    @cached_property
    def inside(self) -> Inside:
        """Its nodes and streams, with what they count in all calls."""
        keys = {id(node): f"n{number}" for number, node in enumerate(self._plan.config.nodes)}
        routes = {route.stream: route for route in self._plan.inputs.values()}
        routes |= {route.stream: route for node in self._plan.nodes for route in node.routes.values()}
        streams = {
            number: routes[edge.stream].tally
            for number, edge in enumerate(self._drawing.edges)
            if not edge.is_side and edge.stream in routes
        }
        nodes = {keys[id(node.config)]: node.tally for node in self._plan.nodes if id(node.config) in keys}
        return Inside(self._drawing, nodes=nodes, streams=streams)

    # Calls

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call with the first packet of each output, or with all of them where the request wants them.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the graph's inputs.
            FailedPrecondition: the run cannot start.
            GraphFailure: a node failed, or an output got nothing.
            PayloadTooLarge: all packets are larger than an answer may be.
            ServerError: what user code raised of its own.

        Cancellation: at any checkpoint; everything that runs for the call is stopped before this returns.
        """
        first = FirstPackets(len(self._plan.outputs))
        every = AllPackets(self._plan.outputs, request.most_bytes) if request.wants_all_packets else None
        instance = self._make_instance(request, every or first)
        with _Observed(self._hooks, "ModelInfer", instance):
            if self._plan.is_chain:
                await self._run_alone(instance, request)
            else:
                async with running(instance):
                    await self._feed(instance, request)
                    await instance.finish()
        return self._answer(request, every.packets if every else [[each] if each else [] for each in first.packets])

    async def _run_alone(self, instance: GraphInstance, request: InferRequest) -> None:
        """Run a call in this task."""
        try:
            await instance.start(None)
            await self._feed(instance, request)
            await instance.finish()
        except trio.BrokenResourceError:
            if instance.failure is None:
                raise
        finally:
            await instance.aclose()

    async def _feed(self, instance: GraphInstance, request: InferRequest) -> None:
        given = timestamp_of(request)
        timestamp = self._timestamps.next() if given is None else given
        pushed, wrong = 0, Gathered()
        with wrong:
            for name, value in self._reader.packets(request):
                await instance.push(name, value, timestamp)
                pushed += 1
        if pushed != len(self._plan.inputs):
            missing = self._plan.inputs.keys() - {tensor.name for tensor in request.inputs}
            if missing or not wrong:
                wrong.add(InvalidRequest(f"{_NOT_ALL_INPUTS}; missing: {', '.join(sorted(missing))}"))
        wrong.tell()

    def _answer(self, request: InferRequest, packets: Sequence[Sequence[Packet]]) -> InferResponse:
        """Make an answer of the packets of each output; its timestamp is that of the last output's first."""
        response = InferResponse(self.name, GRAPH_VERSION, [], request.id)
        wanted = {output.name for output in request.outputs}
        for name, given in zip(self._plan.outputs, packets, strict=True):
            is_left_out = not given and request.wants_all_packets and any(packets)
            if is_left_out or (wanted and name not in wanted):
                continue
            if not given:
                raise GraphFailure(f'{_NO_OUTPUT}: nothing came out of "{name}"')
            for packet in given:
                made = to_output(name, packet.value)
                if isinstance(made, InferResponse):
                    response.outputs += made.outputs
                    response.parameters |= made.parameters
                else:
                    response.outputs.append(made)
            response.parameters["OVMS_MP_TIMESTAMP"] = given[0].timestamp
        return response

    # Streams

    def open_stream(self, first: InferRequest) -> AbstractAsyncContextManager[InferStream]:
        """Open a stream with its first request; see :class:`ovmstrio.core.service.StreamingServable`.

        Raises:
            FailedPrecondition: on entering, when the run cannot start.
            GraphFailure: on leaving, when a node has failed.
            ServerError: what user code raised of its own.

        Ownership: everything that runs for the stream, until the block is left.

        Cancellation: at any checkpoint; everything that runs for the stream is stopped before this returns.
        """
        return self._open(first, ResponseMaker(self.name, self._plan.outputs))

    @asynccontextmanager
    async def _open(
        self,
        first: InferRequest,
        make: Callable[[int, Packet], _T],
        parameters: Mapping[str, ParameterValue] = _NO_PARAMETERS,
        packets: Iterable[tuple[str, Any]] | None = None,
        http: HttpRequest | None = None,
    ) -> AsyncIterator[GraphStream[_T]]:
        """Open a stream whose replies are made by ``make``.

        User code sees ``parameters`` beside those of the first request; ``packets`` take the place of its inputs, where
        it came whole over HTTP.
        """
        send, receive = trio.open_memory_channel[_T | StreamProblem](REPLIES_BUFFERED)
        sink: Replies[_T] = Replies(make, send)
        problem: Exception | None = None
        instance = self._make_instance(first, sink, parameters, http)
        with _Observed(self._hooks, "ModelInferStream", instance), receive:
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(_run, instance, send)
                    stream: GraphStream[_T] = GraphStream(
                        instance, sink, receive, reader=self._reader, timestamps=self._timestamps
                    )
                    if instance.failure is None:
                        await stream.take(first, "partial deserialization of first request", packets)
                        yield stream
                except Exception as error:  # noqa: BLE001 - kept from becoming a group, and raised below
                    problem = error
                nursery.cancel_scope.cancel()
            if problem is not None and instance.failure is None:
                raise problem

    # Texts

    @property
    def tasks(self) -> frozenset[Task]:
        """Making text, if the graph answers chats."""
        return frozenset() if self._plan.config.chat is None else frozenset({Task.TEXT_GENERATION})

    @property
    def limits(self) -> GenerationLimits:
        """None: what user code takes is its own to say."""
        return GenerationLimits()

    def generate(self, asked: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Make text as the node's generator gives it; see :class:`ovmstrio.core.generation.TextGenerator`.

        Raises:
            NotSupported: the graph answers no chats.
            InvalidRequest: on entering, what graphs cannot do was asked for.
            DeadlineExceeded: the deadline has passed.
            ServerError: on entering or from the iteration, as :meth:`open_stream`.

        Cancellation: anywhere; the generator is closed.
        """
        roles = self._plan.config.chat
        if roles is None:
            raise NotSupported(no_chat(self.name))
        open_said = partial(self._open, make=SaidMaker(self.name, self._plan.outputs))
        return generate_text(self.name, roles, open_said, asked)

    # Requests over HTTP

    @property
    def takes_payloads(self) -> bool:
        """Whether an input is tagged ``HTTP_REQUEST_PAYLOAD``."""
        return bool(self._plan.config.payload)

    def open_payload(self, request: HttpRequest, deadline: float) -> AbstractAsyncContextManager[Documents]:
        """Answer a request over HTTP; see :class:`ovmstrio.core.service.PayloadService`.

        Raises:
            NotSupported: the graph takes none.
            ServerError: on entering, or where documents are received, as :meth:`open_stream`.

        Cancellation: anywhere; everything that runs for the request is stopped before this returns.
        """
        name = self._plan.config.payload
        if not name:
            raise NotSupported(
                f'the graph "{self.name}" takes no requests over HTTP; expected input_stream: "{REQUEST_PAYLOAD}:name"'
            )
        return open_documents(self.name, name, partial(self._open, make=document_of), request, deadline)

    # All

    def _make_instance(
        self,
        request: InferRequest,
        sink: Sink,
        parameters: Mapping[str, ParameterValue] = _NO_PARAMETERS,
        http: HttpRequest | None = None,
    ) -> GraphInstance:
        side = self._loaded.side
        if request.parameters:
            side = side | side_packets(request)
        known = {**request.parameters, **parameters} if parameters else request.parameters
        context = InstanceContext(self.name, known, request.id, request.deadline, http=http)
        return GraphInstance(self._plan, context, sink, side)

    @property
    def obstacle(self) -> str:
        """Why it cannot answer now, such as the engine of a node that ended; empty if it can."""
        return next(filter(None, (getattr(node.resources, "obstacle", "") for node in self._plan.nodes)), "")

    async def aclose(self) -> None:
        """Finalize the nodes.  Called once, when no call is in flight.

        Cancellation: shielded, with the bounds of the user's ``finalize``.
        """
        with trio.CancelScope(shield=True):
            await self._loaded.aclose()


class _Observed:
    """Tells the hooks of an instance, and raises at the end why it failed."""

    __slots__ = ("_hooks", "_instance", "_method", "_started")

    def __init__(self, hooks: GraphHooks, method: str, instance: GraphInstance) -> None:
        self._hooks = hooks
        self._method = method
        self._instance = instance
        self._started = perf_counter()

    def __enter__(self) -> None:
        self._hooks.started()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure = self._instance.failure
        ok = exc is None and failure is None
        self._hooks.finished(self._method, perf_counter() - self._started, ok=ok)
        if exc is None and failure is not None:
            raise failure


async def _run(
    instance: GraphInstance,
    send: trio.MemorySendChannel[_T | StreamProblem],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a stream's instance until it has finished, and end the replies after the last."""
    started = False
    async with send:
        try:
            async with running(instance):
                started = True
                task_status.started()
                await instance.wait_finished()
        except Exception:
            if not started:
                raise


def _describe(refs: Sequence[StreamRef]) -> tuple[TensorSpec, ...]:
    """Tell the names of streams; a graph says nothing about types and shapes."""
    return tuple(TensorSpec(name, INVALID, (), None) for name in sorted(ref.name for ref in refs))
