"""A loaded graph as a servable: an instance for each call, and one for each stream."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.datatypes import INVALID
from ovmstrio.core.errors import GraphFailure, InvalidRequest, NotSupported
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import GenerationLimits, Task
from ovmstrio.core.inspection import Inside
from ovmstrio.core.request import InferResponse, ParameterValue, ServableMetadata, StreamProblem
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.runtimes.graphs.calculator import InstanceContext
from ovmstrio.runtimes.graphs.chat.chat_generation import generate_text, no_chat
from ovmstrio.runtimes.graphs.chat.said import SaidMaker
from ovmstrio.runtimes.graphs.graph_drawing import draw
from ovmstrio.runtimes.graphs.graph_instance import GraphInstance, running
from ovmstrio.runtimes.graphs.graph_requests import RequestReader, side_packets, timestamp_of
from ovmstrio.runtimes.graphs.graph_stream import REPLIES_BUFFERED, GraphStream
from ovmstrio.runtimes.graphs.packets import REQUEST_PAYLOAD
from ovmstrio.runtimes.graphs.payload_stream import document_of, open_documents
from ovmstrio.runtimes.graphs.sinks import GRAPH_VERSION, AllPackets, FirstPackets, Replies, ResponseMaker, to_output
from ovmstrio.runtimes.graphs.timestamps import AutomaticTimestamps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from ovmstrio.core.drawing import Drawing
    from ovmstrio.core.generation import Generation, GenerationRequest
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.payloads import Documents
    from ovmstrio.core.request import InferRequest
    from ovmstrio.core.servable import InferStream
    from ovmstrio.runtimes.graphs.config.graph_config import StreamRef
    from ovmstrio.runtimes.graphs.graph_instance import Sink
    from ovmstrio.runtimes.graphs.graph_plan import LoadedGraph
    from ovmstrio.runtimes.graphs.packets import Packet

__all__ = ["GraphServable"]

_T = TypeVar("_T")

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
        """Open a stream with its first request; see :class:`ovmstrio.core.servable.StreamingServable`.

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
        """Answer a request over HTTP; see :class:`ovmstrio.core.payloads.PayloadService`.

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
