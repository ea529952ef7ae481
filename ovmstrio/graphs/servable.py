"""A loaded graph as a servable: one instance per call and per stream, and text generation.

::

    GenerationRequest ─> _create_request ─> instance of the graph ─> Said ... ─> GraphGeneration ─> Piece ...

The reply channel of a generation is bounded, so a slow client blocks only its own generator.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import orjson
import structlog
import trio

from ovmstrio.core.errors import (
    DeadlineExceeded,
    ErrorList,
    GraphFailure,
    InvalidField,
    InvalidRequest,
    NotSupported,
    ServerError,
)
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationLimits,
    Sampling,
    StopStrings,
    Task,
)
from ovmstrio.core.payloads import RawDocument
from ovmstrio.core.request import (
    InferInput,
    InferRequest,
    InferResponse,
    ParameterValue,
    ServableMetadata,
    StreamProblem,
)
from ovmstrio.core.service import Introspection
from ovmstrio.core.tensor import BY_NAME, BYTES, INVALID, RawTensor, TensorSpec
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, USER_DOCUMENT, parse_as_python, read_json
from ovmstrio.graphs.calculator import InstanceContext
from ovmstrio.graphs.instance import (
    GRAPH_VERSION,
    AllPacketSink,
    FirstPacketSink,
    GraphInstance,
    ReplyChannelSink,
    ResponseSink,
    output_of_value,
    run_instance,
)
from ovmstrio.graphs.packets import REQUEST_PAYLOAD_TAG, AutomaticTimestamps
from ovmstrio.graphs.plan import draw_graph
from ovmstrio.graphs.python_nodes.api import HttpPayload
from ovmstrio.graphs.requests import GraphRequestParser, graph_failure, side_packets, timestamp_of
from ovmstrio.graphs.tensors import input_spec
from ovmstrio.models.tensor_contents import bytes_elements
from ovmstrio.util.slices import run_to_end
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    from ovmstrio.core.generation import Generation, GenerationRequest
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.payloads import DocumentStream
    from ovmstrio.core.service import InferStream
    from ovmstrio.graphs.graph_config import ChatRoles, StreamRef
    from ovmstrio.graphs.instance import OutputSink
    from ovmstrio.graphs.packets import Packet
    from ovmstrio.graphs.plan import LoadedGraph
    from ovmstrio.util.drawing import Drawing

# ----------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_T = TypeVar("_T")


_VERSIONS: Final = frozenset({"1", "0", ""})
_WRONG_NAME: Final = "Subsequent request with incorrect servable name"
_WRONG_VERSION: Final = "Subsequent request with incorrect servable version"


class GraphStream(Generic[_T]):
    """An open stream of a graph; an ``InferStream`` if its replies are responses."""

    def __init__(
        self,
        instance: GraphInstance,
        sink: ReplyChannelSink[_T],
        replies: trio.MemoryReceiveChannel[_T | StreamProblem],
        *,
        reader: GraphRequestParser,
        timestamps: AutomaticTimestamps,
    ) -> None:
        self.replies = replies
        self._instance = instance
        self._sink = sink
        self._responses = sink if isinstance(sink, ResponseSink) else None
        self._reader = reader
        self._timestamps = timestamps

    async def receive(self) -> _T | None:
        """Return the next reply; None at the end.

        Raises:
            InvalidRequest: a request of the stream is invalid.
            ServerError: the graph failed; leaving the stream's block raises it again.
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
        """Process another request; an error of the request becomes a ``StreamProblem`` reply.

        Waits while queues or replies are full. A cancelled request may have been accepted in part.

        Raises:
            trio.BrokenResourceError: the graph has ended.
        """
        if request.model_name != self._instance.context.graph:
            await self._refuse(request, f"{_WRONG_NAME}; validate subsequent requests")
        elif request.model_version not in _VERSIONS:
            await self._refuse(request, f"{_WRONG_VERSION}; validate subsequent requests")
        else:
            await self.take(request, "partial deserialization of subsequent requests")
            if self._instance.is_finished:
                raise trio.BrokenResourceError("the graph has ended")

    def end(self) -> None:
        """Mark the end of requests; running nodes finish."""
        self._instance.close_inputs()
        self._instance.dispatch()

    async def take(self, request: InferRequest, context: str, packets: Iterable[tuple[str, Any]] | None = None) -> None:
        """Push a request's inputs, or ``packets`` by input name; errors become replies that end with ``context``."""
        instance, responses = self._instance, self._responses
        instance.context.request_id = request.id
        try:
            requested = timestamp_of(request)
            timestamp = self._timestamps.next() if requested is None else requested
            if responses is not None:
                responses.begin(request, timestamp)
            for name, value in self._reader.packets(request) if packets is None else packets:
                await instance.push(name, value, timestamp)
        except ServerError as error:
            instance.dispatch()
            await self._refuse(request, f"{error.message}; {context}")
        except trio.BrokenResourceError:
            # `receive` raises the instance's failure at the end of the stream.
            return
        if responses is not None:
            responses.accept()
        instance.dispatch()
        if responses is not None and instance.is_idle:
            responses.end_requests()

    async def _refuse(self, request: InferRequest, message: str) -> None:
        if not self._sink.refuse(request, message):
            await self._sink.wait_room()


# ----------------------------------------------------------------------
# Text generation
# ----------------------------------------------------------------------

# Requests

_NO_PARAMETERS: Final = frozenset({"best_of", "stop_token_ids"})


def _create_request(graph: str, roles: ChatRoles, generation: GenerationRequest) -> InferRequest:
    wrong = ErrorList(_unsupported_options(graph, generation))
    request = InferRequest(graph, deadline=generation.deadline)
    for name, encode in ((roles.prompt, _prompt), (roles.messages, _messages)):
        if name:
            with wrong:
                # Like `/generate`: the bytes of the text without the 4-byte length prefix of BYTES tensors.
                data = encode(graph, generation)
                request.inputs.append(InferInput(name, BYTES.name, (len(data),)))
                request.raw_inputs.append(data)
    wrong.raise_if_any()
    return request


def _sampling_parameters(generation: GenerationRequest) -> dict[str, ParameterValue]:
    """Return the requested sampling options by their API names; unset options are left out."""
    sampling = generation.sampling
    given = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    parameters = {name: value for name, value in given.items() if value is not None and name not in _NO_PARAMETERS}
    if sampling.max_tokens is not None:
        parameters["max_new_tokens"] = sampling.max_tokens
    if isinstance(generation.prompt, Conversation) and generation.prompt.template_options:
        parameters["chat_template_kwargs"] = json.dumps(dict(generation.prompt.template_options))
    return parameters


def _unsupported_options(graph: str, generation: GenerationRequest) -> Iterator[InvalidField]:
    prefix = f'graph "{graph}" runs user code and'
    sampling, prompt = generation.sampling, generation.prompt
    if generation.n > 1:
        yield InvalidField(f"n: {prefix} generates one text per request; expected 1", field="n", got=str(generation.n))
    if sampling.best_of > 1:
        message = f"best_of: {prefix} has no beam search; expected 1"
        yield InvalidField(message, field="best_of", got=str(sampling.best_of))
    if generation.logprobs:
        yield InvalidField(f"logprobs: {prefix} returns no probabilities; leave it out", field="logprobs")
    if generation.prompt_logprobs is not None:
        message = f"prompt_logprobs: {prefix} returns no probabilities; leave it out"
        yield InvalidField(message, field="prompt_logprobs")
    if generation.echo:
        yield InvalidField(f"echo: {prefix} does not return the prompt; leave it out", field="echo")
    if sampling.stop_token_ids:
        yield InvalidField(f"stop_token_ids: {prefix} has no token ids; use stop", field="stop_token_ids")
    if generation.grammar is not None:
        message = f"response_format: {prefix} has no structured output; leave it out, or use type text"
        yield InvalidField(message, field="response_format")
    if isinstance(prompt, Conversation) and prompt.continues_final_message:
        message = f"continue_final_message: {prefix} begins a new message; leave it out"
        yield InvalidField(message, field="continue_final_message")
    if isinstance(prompt, Conversation) and prompt.tools and prompt.tool_choice != "none":
        yield InvalidField(
            f'tools: {prefix} calls no tools; leave them out, or set tool_choice to "none"', field="tools"
        )


def _prompt(graph: str, generation: GenerationRequest) -> bytes:
    match generation.prompt:
        case str() as text:
            return _encoded(text)
        case Conversation(messages=messages):
            return _encoded(_last_user_message(messages))
        case _:
            message = f'prompt: graph "{graph}" runs user code; expected a text'
            raise InvalidField(message, field="prompt", got="token ids")


def _messages(graph: str, generation: GenerationRequest) -> bytes:
    if isinstance(generation.prompt, Conversation):
        messages = [dict(message) for message in generation.prompt.messages]
    else:
        messages = [{"role": "user", "content": _prompt(graph, generation).decode()}]
    return _encoded(json.dumps(messages, ensure_ascii=False))


def _last_user_message(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            return str(message.get("content") or "")
    roles = ", ".join(str(message.get("role"))[:20] for message in messages[-8:])
    raise InvalidField('messages: expected one with the role "user"', field="messages", got=roles or "none")


def _encoded(text: str) -> bytes:
    # Replace half a surrogate pair, which user code could not decode, instead of rejecting the request.
    return text.encode(errors="replace")


# Generation

_LATE: Final = "deadline exceeded while the graph generated text"


def no_chat_message(graph: str) -> str:
    """Return the error message for a graph without chat streams."""
    return (
        f'graph "{graph}" has no chat streams: expected a Python node with a LOOPBACK, one input and one or two '
        "outputs of Python tensors; or name the streams in the graph file: # OVMSTRIO_CHAT: prompt=INPUT text=OUTPUT"
    )


@asynccontextmanager
async def generate_text(
    graph: str,
    roles: ChatRoles,
    open_texts: Callable[..., AbstractAsyncContextManager[GraphStream[OutputText]]],
    generation: GenerationRequest,
) -> AsyncIterator[GraphGeneration]:
    """Generate one text; leaving the block stops the instance."""
    first = _create_request(graph, roles, generation)
    is_left = False
    with trio.CancelScope(deadline=generation.deadline) as scope:
        try:
            async with open_texts(first, parameters=_sampling_parameters(generation)) as stream:
                # From here on the iteration raises DeadlineExceeded, where its reader expects it.
                scope.deadline = math.inf
                stream.end()
                yield GraphGeneration(graph, roles, stream, generation)
                is_left = True
        except ServerError:
            # The iteration has raised the error already, or the reader has stopped.
            if not is_left:
                raise
    if scope.cancelled_caught:
        raise DeadlineExceeded(_LATE)


class GraphGeneration:
    """One text generated by a graph; see :class:`ovmstrio.core.generation.Generation`.

    Each text packet is one piece and counts as one token, unless the graph has a usage output.
    """

    def __init__(
        self, graph: str, roles: ChatRoles, stream: GraphStream[OutputText], generation: GenerationRequest
    ) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._graph = graph
        self._roles = roles
        self._stream = stream
        self._deadline = generation.deadline
        self._max_tokens = generation.sampling.max_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(generation.stop, keeps=generation.includes_stop)
        self._packets = 0
        self._counted = 0
        self._usage_tokens: int | None = None
        self._has_finished = False

    def listen(self, take: Callable[[Iterable[GenerationChunk]], bool]) -> None:
        """Do nothing: the graph's stream wakes only the task that receives from it."""

    def __aiter__(self) -> Self:
        """Iterate over the pieces; the last one has a ``finish``."""
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._has_finished:
            raise StopAsyncIteration
        while True:
            received = await self._receive()
            if received is None or received.output == self._roles.end:
                return await self._end(received)
            if received.output == self._roles.usage:
                self._note_usage(received.data)
            elif received.output == self._roles.text:
                return self._piece(received.data)

    async def _receive(self) -> OutputText | None:
        with trio.CancelScope(deadline=self._deadline):
            return await self._stream.receive()
        raise DeadlineExceeded(_LATE)

    def _piece(self, data: bytes) -> GenerationChunk:
        self._packets += 1
        text = self._stops.feed(self._decoder.decode(data))
        if self._stops.found:
            return self._final_piece(text, Finish.STOP)
        if self._max_tokens is not None and self._packets >= self._max_tokens:
            return self._final_piece(text + self._flush(), Finish.LENGTH)
        tokens = 0 if self._roles.usage else 1
        self._counted += tokens
        return GenerationChunk(text=text, tokens=tokens)

    async def _end(self, received: OutputText | None) -> GenerationChunk:
        """Build the last piece at the graph's end; the usage packet may follow it."""
        while received is not None and self._roles.usage and self._usage_tokens is None:
            received = await self._receive()
            if received is not None and received.output == self._roles.usage:
                self._note_usage(received.data)
        is_full = (
            self._max_tokens is not None and self._usage_tokens is not None and self._usage_tokens >= self._max_tokens
        )
        return self._final_piece(self._flush(), Finish.LENGTH if is_full else Finish.STOP)

    def _flush(self) -> str:
        """Return text held back by the decoder and the stop strings."""
        return self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.finish()

    def _final_piece(self, text: str, finish: Finish) -> GenerationChunk:
        self._has_finished = True
        total = self._packets if self._usage_tokens is None else self._usage_tokens
        return GenerationChunk(text=text, tokens=max(0, total - self._counted), finish=finish, stop=self._stops.found)

    def _note_usage(self, data: bytes) -> None:
        try:
            document: Any = orjson.loads(data)
            counts = [document.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
        except (ValueError, AttributeError):
            counts = [-1]
        if not all(count is None or (type(count) is int and count >= 0) for count in counts):
            found = data[:80].decode(errors="replace")
            raise GraphFailure(
                f'usage output "{self._roles.usage}" of graph "{self._graph}": expected JSON such as '
                f'{{"prompt_tokens": 7, "completion_tokens": 12}}, got {found}'
            )
        prompt, self._usage_tokens, cached = counts
        self.prompt_tokens, self.cached_tokens = prompt or 0, cached or 0


# Output texts

_TEXT_DATATYPES: Final = frozenset({"BYTES", "UINT8", "INT8"})


class OutputText(NamedTuple):
    """Bytes of an output packet, with the output's name."""

    output: str
    data: bytes


class TextExtractor:
    """Converter of packets to texts; ``outputs`` are the graph's, by number."""

    def __init__(self, graph: str, outputs: Sequence[str]) -> None:
        self._graph = graph
        self._outputs = outputs

    def __call__(self, output: int, packet: Packet) -> OutputText:
        """Return the bytes of a packet; length-prefixed elements are joined."""
        name = self._outputs[output]
        tensor = output_of_value(name, packet.value)
        is_text = isinstance(tensor, RawTensor) and (
            tensor.datatype in _TEXT_DATATYPES or tensor.datatype not in BY_NAME  # a custom datatype
        )
        if not isinstance(tensor, RawTensor) or not is_text:
            found = str(tensor.datatype) if isinstance(tensor, RawTensor) else type(tensor).__name__
            raise GraphFailure(
                f'output "{name}" of graph "{self._graph}": expected UTF-8 bytes, as in '
                f"Tensor({name!r}, text.encode()), got {found}"
            )
        return OutputText(name, _joined(tensor) if tensor.datatype == BYTES.name else bytes(tensor.data))


def _joined(tensor: RawTensor) -> bytes:
    """Join length-prefixed elements; other bytes are the text itself."""
    given = InferInput(tensor.name, BYTES.name, tensor.shape)
    try:
        return b"".join(bytes_elements(given, tensor.data, input_spec(given, BYTES)))
    except InvalidRequest:
        return bytes(tensor.data)


# ----------------------------------------------------------------------
# Servable
# ----------------------------------------------------------------------

# Streams


_MAX_BUFFERED_REPLIES: Final = 32
"""Capacity of a stream's reply channel; nodes wait when it is full."""


# Raw HTTP requests

_BINARY = "application/octet-stream"


@asynccontextmanager
async def _open_document_stream(
    graph: str,
    name: str,
    open_: Callable[..., AbstractAsyncContextManager[GraphStream[RawDocument]]],
    request: HttpRequest,
    deadline: float,
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
_NO_EXTRA_PARAMETERS: Final[Mapping[str, ParameterValue]] = MappingProxyType({})
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
        every = AllPacketSink(self._plan.outputs, request.max_output_bytes) if request.wants_all_packets else None
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
        wrong.raise_if_any()

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
                    # Python tensors keep their own names, as in OVMS, unless the client requested the stream's name.
                    response.outputs.append(replace(output, name=name) if wanted else output)
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
        return self._open(first, partial(ResponseSink, self.name, self._plan.outputs))

    @asynccontextmanager
    async def _open(
        self,
        first: InferRequest,
        make_sink: Callable[[trio.MemorySendChannel[_T | StreamProblem]], ReplyChannelSink[_T]],
        parameters: Mapping[str, ParameterValue] = _NO_EXTRA_PARAMETERS,
        packets: Iterable[tuple[str, Any]] | None = None,
        http: HttpRequest | None = None,
    ) -> AsyncIterator[GraphStream[_T]]:
        """Open a stream whose replies a sink creates.

        ``parameters`` extend those of the first request for user code; ``packets`` replace its inputs.
        """
        send, receive = trio.open_memory_channel[_T | StreamProblem](_MAX_BUFFERED_REPLIES)
        sink = make_sink(send)
        problem: Exception | None = None
        instance = self._make_instance(first, sink, parameters, http)
        if isinstance(sink, ResponseSink):
            instance.on_idle, sink.output_bounds = sink.end_requests, instance.output_bounds
        with _Observed(self._hooks, "ModelInferStream", instance), receive:
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(_run, instance, sink, send)
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
        open_texts = partial(
            self._open, make_sink=partial(ReplyChannelSink, TextExtractor(self.name, self._plan.outputs))
        )
        return generate_text(self.name, roles, open_texts, asked)

    # Raw HTTP requests

    @property
    def accepts_payloads(self) -> bool:
        """True if an input is tagged ``HTTP_REQUEST_PAYLOAD``."""
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
            self.name,
            name,
            partial(self._open, make_sink=partial(ReplyChannelSink, _document_of_packet)),
            request,
            deadline,
        )

    def _make_instance(
        self,
        request: InferRequest,
        sink: OutputSink,
        parameters: Mapping[str, ParameterValue] = _NO_EXTRA_PARAMETERS,
        http: HttpRequest | None = None,
    ) -> GraphInstance:
        side = self._loaded.side
        if request.parameters:
            side = side | side_packets(request)
        known = {**request.parameters, **parameters} if parameters else request.parameters
        context = InstanceContext(self.name, known, request.id, request.deadline, http=http)
        return GraphInstance(self._plan, context, sink, side)

    @property
    def unready_reason(self) -> str:
        """Reason why the graph is not ready, such as a node's failed engine; empty if it is ready."""
        return next(filter(None, (getattr(node.resources, "unready_reason", "") for node in self._plan.nodes)), "")

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
    sink: ReplyChannelSink[_T],
    send: trio.MemorySendChannel[_T | StreamProblem],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a stream's instance until it has finished and all its replies are in the channel, then close the channel."""
    started = False
    async with send:
        try:
            async with run_instance(instance):
                started = True
                task_status.started()
                await instance.wait_finished()
        except Exception as error:
            if not started:
                raise
            log.exception("graph stream failed", graph=instance.context.graph, error=text_of(error))
            instance.fail(graph_failure("internal error; the server's log has the details"))
        # A failure cancels the nodes that wait for room, and their replies precede it.
        await sink.wait_room()


def _describe(refs: Sequence[StreamRef]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, INVALID, (), None) for name in sorted(ref.name for ref in refs))
