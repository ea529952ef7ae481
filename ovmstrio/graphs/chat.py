"""Text generation by graphs: output packets become pieces of text, up to an end, stop string or token limit.

::

    GenerationRequest ─> _create_request ─> instance of the graph ─> Said ... ─> GraphGeneration ─> Piece ...

The reply channel is bounded, so a slow client blocks only its own generator.
"""

from __future__ import annotations

import codecs
import json
import math
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import orjson
import trio

from ovmstrio.core.errors import DeadlineExceeded, ErrorList, GraphFailure, InvalidField, InvalidRequest, ServerError
from ovmstrio.core.generation import Conversation, Finish, GenerationChunk, Sampling, StopStrings
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import BY_NAME, BYTES, RawTensor
from ovmstrio.graphs.instance import output_of_value
from ovmstrio.graphs.tensors import input_spec
from ovmstrio.models.tensor_contents import bytes_elements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.core.request import ParameterValue
    from ovmstrio.graphs.graph_config import ChatRoles
    from ovmstrio.graphs.graph_stream import GraphStream
    from ovmstrio.graphs.packets import Packet

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
    wrong.tell()
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
    if generation.echo:
        yield InvalidField(f"echo: {prefix} does not return the prompt; leave it out", field="echo")
    if sampling.stop_token_ids:
        yield InvalidField(f"stop_token_ids: {prefix} has no token ids; use stop", field="stop_token_ids")
    if generation.grammar is not None:
        message = f"response_format: {prefix} has no structured output; leave it out, or use type text"
        yield InvalidField(message, field="response_format")
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


class _OpenTextStream(Protocol):
    """Function that opens a stream of output texts; see ``GraphServable.open_stream``."""

    def __call__(
        self, first: InferRequest, *, parameters: Mapping[str, ParameterValue]
    ) -> AbstractAsyncContextManager[GraphStream[OutputText]]: ...


@asynccontextmanager
async def generate_text(
    graph: str, roles: ChatRoles, open_texts: _OpenTextStream, generation: GenerationRequest
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
        if self._stops.has_stopped:
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
        return GenerationChunk(text=text, tokens=max(0, total - self._counted), finish=finish)

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
