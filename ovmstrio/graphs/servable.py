"""A loaded graph as a servable: one instance per call and per stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.errors import DeadlineExceeded, ErrorList, GraphFailure, InvalidRequest, NotSupported, ServerError
from ovmstrio.core.generation import GenerationLimits, Task
from ovmstrio.core.payloads import RawDocument
from ovmstrio.core.request import InferRequest, InferResponse, ParameterValue, ServableMetadata, StreamProblem
from ovmstrio.core.service import Introspection
from ovmstrio.core.tensor import INVALID, RawTensor, TensorSpec
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, USER_DOCUMENT, parse_as_python, read_json
from ovmstrio.graphs.calculator import InstanceContext
from ovmstrio.graphs.chat import TextExtractor, generate_text, no_chat_message
from ovmstrio.graphs.graph_stream import GraphStream
from ovmstrio.graphs.instance import (
    GRAPH_VERSION,
    AllPacketSink,
    FirstPacketSink,
    GraphInstance,
    ReplyChannelSink,
    ResponseConverter,
    output_of_value,
    run_instance,
)
from ovmstrio.graphs.packets import REQUEST_PAYLOAD_TAG, AutomaticTimestamps
from ovmstrio.graphs.plan import draw_graph
from ovmstrio.graphs.requests import GraphRequestParser, graph_failure, side_packets, timestamp_of
from ovmstrio.util.slices import run_to_end
from pyovms import HttpPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Protocol

    from ovmstrio.core.generation import Generation, GenerationRequest
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.payloads import DocumentStream
    from ovmstrio.core.service import InferStream
    from ovmstrio.graphs.graph_config import StreamRef
    from ovmstrio.graphs.instance import OutputSink
    from ovmstrio.graphs.packets import Packet
    from ovmstrio.graphs.plan import LoadedGraph
    from ovmstrio.util.drawing import Drawing

# Streams

_T = TypeVar("_T")

_MAX_BUFFERED_REPLIES: Final = 32
"""Capacity of a stream's reply channel; nodes wait when it is full."""


# Raw HTTP requests

if TYPE_CHECKING:

    class OpenDocuments(Protocol):
        """Function that opens a stream of HTTP documents; see ``GraphServable``."""

        def __call__(
            self, first: InferRequest, *, packets: Sequence[tuple[str, Any]], http: HttpRequest
        ) -> AbstractAsyncContextManager[GraphStream[RawDocument]]:
            """Open the stream with ``packets`` in place of the inputs of ``first``."""
            ...


_BINARY = "application/octet-stream"


@asynccontextmanager
async def _open_document_stream(
    graph: str, name: str, open_: OpenDocuments, request: HttpRequest, deadline: float
) -> AsyncIterator[DocumentStream]:
    """Process an HTTP request with a graph whose input is ``name``; see ``PayloadService.open_payload``."""
    first = InferRequest(graph, id=request.header("x-request-id") or "", deadline=deadline)
    is_left = False
    with trio.CancelScope(deadline=deadline) as scope:
        try:
            async with open_(first, packets=[(name, _payload(name, request))], http=request) as stream:
                stream.end()
                yield stream
                is_left = True
        except ServerError:
            # `receive` has raised the error already, or the reader has stopped.
            if not is_left:
                raise
    if scope.cancelled_caught:
        raise DeadlineExceeded("deadline exceeded while the graph ran")


def _payload(name: str, request: HttpRequest) -> HttpPayload:
    headers: dict[str, str] = {}
    for key, value in request.headers:
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    head = (request.method, request.target, headers, request.client.host)
    return HttpPayload._received(name, request.body, head, _parse)  # noqa: SLF001 - pyovms's interface for the server


def _parse(body: bytes) -> Any:
    """Parse JSON in the thread of user code, large bodies in slices so that the event loop can run between them."""
    if len(body) <= AT_ONCE_BYTES:
        return json.loads(body)
    return run_to_end(read_json(body, USER_DOCUMENT, parse=parse_as_python))


def _document_of_packet(_: int, packet: Packet) -> RawDocument:
    """Convert a packet to an HTTP document; a tensor's datatype is its content type if it contains a slash.

    Raises:
        GraphFailure: the value is not a tensor of a Python node.
    """
    output = output_of_value("payload", packet.value)
    if not isinstance(output, RawTensor):
        raise graph_failure(f"response: expected dict, str, bytes or pyovms.Tensor, got {type(output).__name__}")
    return RawDocument(bytes(output.data), output.datatype if "/" in output.datatype else _BINARY)


_PLATFORM: Final = "OpenVINO"
_NOT_ALL_INPUTS: Final = "Invalid number of inputs - Not all input packets created"
_NO_PARAMETERS: Final[Mapping[str, ParameterValue]] = MappingProxyType({})
_NO_OUTPUT: Final = "Mediapipe execution failed. MP status - Unknown error during mediapipe execution"


class GraphServable:
    """A loaded graph.

    Args:
        name: the served name.
        loaded: plan and shared state; owned by the servable.
        hooks: observers of instances.
    """

    def __init__(self, name: str, loaded: LoadedGraph, hooks: GraphHooks) -> None:
        self.name = name
        self._loaded = loaded
        self._plan = loaded.plan
        self._hooks = hooks
        config = loaded.plan.config
        self._reader = GraphRequestParser(config.inputs)
        self._timestamps = AutomaticTimestamps()
        self.metadata = ServableMetadata(name, _PLATFORM, _describe(config.inputs), _describe(config.outputs))

    @cached_property
    def _drawing(self) -> Drawing:
        return draw_graph(self._plan.config)

    @cached_property
    def inside(self) -> Introspection:
        """Nodes and streams of the graph with their counters."""
        keys = {id(node): f"n{number}" for number, node in enumerate(self._plan.config.nodes)}
        routes = {route.stream: route for route in self._plan.inputs.values()}
        routes |= {route.stream: route for node in self._plan.nodes for route in node.routes.values()}
        streams = {
            number: routes[edge.stream].tally
            for number, edge in enumerate(self._drawing.edges)
            if not edge.is_side and edge.stream in routes
        }
        nodes = {keys[id(node.config)]: node.tally for node in self._plan.nodes if id(node.config) in keys}
        return Introspection(self._drawing, nodes=nodes, streams=streams)

    # Calls

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run the graph once and return the first packet of each output, or all packets if the request wants them.

        The request's buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the graph's inputs.
            FailedPrecondition: the run cannot start.
            GraphFailure: a node failed, or an output received nothing.
            PayloadTooLarge: all packets together exceed the response limit.
            ServerError: raised by user code.
        """
        first = FirstPacketSink(len(self._plan.outputs))
        every = AllPacketSink(self._plan.outputs, request.most_bytes) if request.wants_all_packets else None
        instance = self._make_instance(request, every or first)
        with _Observed(self._hooks, "ModelInfer", instance):
            if self._plan.is_chain:
                await self._run_chain(instance, request)
            else:
                async with run_instance(instance):
                    await self._feed(instance, request)
                    await instance.finish()
        return self._build_response(
            request, every.packets if every else [[each] if each else [] for each in first.packets]
        )

    async def _run_chain(self, instance: GraphInstance, request: InferRequest) -> None:
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
        requested = timestamp_of(request)
        timestamp = self._timestamps.next() if requested is None else requested
        pushed, wrong = 0, ErrorList()
        with wrong:
            for name, value in self._reader.packets(request):
                await instance.push(name, value, timestamp)
                pushed += 1
        if pushed != len(self._plan.inputs):
            missing = self._plan.inputs.keys() - {tensor.name for tensor in request.inputs}
            if missing or not wrong:
                wrong.add(InvalidRequest(f"{_NOT_ALL_INPUTS}; missing: {', '.join(sorted(missing))}"))
        wrong.tell()

    def _build_response(self, request: InferRequest, packets: Sequence[Sequence[Packet]]) -> InferResponse:
        """Build the response; its timestamp is that of the last output's first packet."""
        response = InferResponse(self.name, GRAPH_VERSION, [], request.id)
        wanted = {requested.name for requested in request.outputs}
        for name, output_packets in zip(self._plan.outputs, packets, strict=True):
            is_omitted = not output_packets and request.wants_all_packets and any(packets)
            if is_omitted or (wanted and name not in wanted):
                continue
            if not output_packets:
                raise GraphFailure(f'{_NO_OUTPUT}: nothing came out of "{name}"')
            for packet in output_packets:
                output = output_of_value(name, packet.value)
                if isinstance(output, InferResponse):
                    response.outputs += output.outputs
                    response.parameters |= output.parameters
                else:
                    response.outputs.append(output)
            response.parameters["OVMS_MP_TIMESTAMP"] = output_packets[0].timestamp
        return response

    # Streams

    def open_stream(self, first: InferRequest) -> AbstractAsyncContextManager[InferStream]:
        """Open a stream with its first request; see :class:`ovmstrio.core.service.StreamingServable`.

        Raises:
            FailedPrecondition: on entering, when the run cannot start.
            GraphFailure: on leaving, when a node has failed.
            ServerError: raised by user code.
        """
        return self._open(first, ResponseConverter(self.name, self._plan.outputs))

    @asynccontextmanager
    async def _open(
        self,
        first: InferRequest,
        convert: Callable[[int, Packet], _T],
        parameters: Mapping[str, ParameterValue] = _NO_PARAMETERS,
        packets: Iterable[tuple[str, Any]] | None = None,
        http: HttpRequest | None = None,
    ) -> AsyncIterator[GraphStream[_T]]:
        """Open a stream whose replies ``convert`` creates.

        ``parameters`` extend those of the first request for user code; ``packets`` replace its inputs.
        """
        send, receive = trio.open_memory_channel[_T | StreamProblem](_MAX_BUFFERED_REPLIES)
        sink: ReplyChannelSink[_T] = ReplyChannelSink(convert, send)
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
                except Exception as error:  # noqa: BLE001 - raised below, outside the nursery, so that it is not grouped
                    problem = error
                nursery.cancel_scope.cancel()
            if problem is not None and instance.failure is None:
                raise problem

    # Text generation

    @property
    def tasks(self) -> frozenset[Task]:
        """Text generation, if the graph has chat streams."""
        return frozenset() if self._plan.config.chat is None else frozenset({Task.TEXT_GENERATION})

    @property
    def limits(self) -> GenerationLimits:
        """No limits: the server does not know those of user code."""
        return GenerationLimits()

    def generate(self, asked: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Generate text with the graph's chat streams; see :class:`ovmstrio.core.generation.TextGenerator`.

        Raises:
            NotSupported: the graph has no chat streams.
            InvalidRequest: on entering: the request has unsupported options.
            DeadlineExceeded: the deadline has passed.
            ServerError: on entering or from the iteration, like :meth:`open_stream`.
        """
        roles = self._plan.config.chat
        if roles is None:
            raise NotSupported(no_chat_message(self.name))
        open_texts = partial(self._open, convert=TextExtractor(self.name, self._plan.outputs))
        return generate_text(self.name, roles, open_texts, asked)

    # Raw HTTP requests

    @property
    def accepts_payloads(self) -> bool:
        """Whether an input is tagged ``HTTP_REQUEST_PAYLOAD``."""
        return bool(self._plan.config.payload)

    def open_payload(self, request: HttpRequest, deadline: float) -> AbstractAsyncContextManager[DocumentStream]:
        """Process a raw HTTP request; see :class:`ovmstrio.core.payloads.RawHttpService`.

        Raises:
            NotSupported: the graph has no input for HTTP requests.
            ServerError: on entering or while receiving documents, like :meth:`open_stream`.
        """
        name = self._plan.config.payload
        if not name:
            raise NotSupported(
                f'graph "{self.name}" accepts no raw HTTP requests; expected input_stream: "{REQUEST_PAYLOAD_TAG}:name"'
            )
        return _open_document_stream(
            self.name, name, partial(self._open, convert=_document_of_packet), request, deadline
        )

    def _make_instance(
        self,
        request: InferRequest,
        sink: OutputSink,
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
        """Reason why the graph is not ready, such as a node's failed engine; empty if it is ready."""
        return next(filter(None, (getattr(node.resources, "obstacle", "") for node in self._plan.nodes)), "")

    async def aclose(self) -> None:
        """Finalize the nodes, shielded from cancellation. Called once, after the last call."""
        with trio.CancelScope(shield=True):
            await self._loaded.aclose()


class _Observed:
    """Context of an instance that reports to the hooks and raises the instance's failure on exit."""

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
    """Run a stream's instance until it has finished, then close the reply channel."""
    started = False
    async with send:
        try:
            async with run_instance(instance):
                started = True
                task_status.started()
                await instance.wait_finished()
        except Exception:
            if not started:
                raise


def _describe(refs: Sequence[StreamRef]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, INVALID, (), None) for name in sorted(ref.name for ref in refs))
