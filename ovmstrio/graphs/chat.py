"""A graph that makes a text: packets of its outputs as pieces, until its end, a stop string, or enough of it.

::

    GenerationRequest ─> chat_request ─> instance of the graph ─> Said ... ─> GraphGeneration ─> Piece ...

The replies' channel has a bound, so that a client who does not read holds up its own generator and nothing else.
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

from ovmstrio.core.errors import DeadlineExceeded, Gathered, GraphFailure, InvalidField, InvalidRequest, ServerError
from ovmstrio.core.generation import Conversation, Finish, Piece, Sampling, StopStrings
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import BY_NAME, BYTES, RawTensor
from ovmstrio.graphs.instance import to_output
from ovmstrio.graphs.tensors import described
from ovmstrio.models.tensor_contents import elements_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.core.request import ParameterValue
    from ovmstrio.graphs.graph_config import ChatRoles
    from ovmstrio.graphs.packets import Packet
    from ovmstrio.graphs.servable import GraphStream

__all__ = ["GraphGeneration", "Said", "SaidMaker", "chat_request", "generate_text", "no_chat", "sampling_parameters"]

# ----------------------------------------------------------------------
# From what is asked of a text to the request of a graph and its parameters, and what no graph can do
# ----------------------------------------------------------------------

_NO_PARAMETERS: Final = frozenset({"best_of", "stop_token_ids"})


def chat_request(graph: str, roles: ChatRoles, asked: GenerationRequest) -> InferRequest:
    """Make the request that a graph's inputs are fed with.

    Raises:
        InvalidField: graphs cannot do something of it, or it has no message of a user; all of it is told.
    """
    wrong = Gathered(_cannot(graph, asked))
    request = InferRequest(graph, deadline=asked.deadline)
    for name, give in ((roles.prompt, _prompt), (roles.messages, _messages)):
        if name:
            with wrong:
                _add(request, name, give(graph, asked))
    wrong.tell()
    return request


def sampling_parameters(asked: GenerationRequest) -> dict[str, ParameterValue]:
    """Give what was asked of the choice of tokens, by its names in the API; what was not asked for is left out."""
    sampling = asked.sampling
    given = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    parameters = {name: value for name, value in given.items() if value is not None and name not in _NO_PARAMETERS}
    if sampling.max_tokens is not None:
        parameters["max_new_tokens"] = sampling.max_tokens
    if isinstance(asked.prompt, Conversation) and asked.prompt.template_options:
        parameters["chat_template_kwargs"] = json.dumps(dict(asked.prompt.template_options))
    return parameters


def _cannot(graph: str, asked: GenerationRequest) -> Iterator[InvalidField]:
    """Tell what is asked for that a graph cannot do."""
    whose = f'"{graph}" is a graph of user code, which'
    sampling, prompt = asked.sampling, asked.prompt
    if asked.n > 1:
        yield InvalidField(f"n: {whose} makes one text for a request; expected 1", field="n", got=str(asked.n))
    if sampling.best_of > 1:
        message = f"best_of: {whose} searches no beams; expected 1"
        yield InvalidField(message, field="best_of", got=str(sampling.best_of))
    if asked.logprobs:
        yield InvalidField(f"logprobs: {whose} tells no probabilities; leave it out", field="logprobs")
    if asked.echo:
        yield InvalidField(f"echo: {whose} does not say the prompt again; leave it out", field="echo")
    if sampling.stop_token_ids:
        yield InvalidField(f"stop_token_ids: {whose} has no numbers of tokens; use stop", field="stop_token_ids")
    if asked.grammar is not None:
        message = f"response_format: {whose} is held to no form; leave it out, or ask for the type text"
        yield InvalidField(message, field="response_format")
    if isinstance(prompt, Conversation) and prompt.tools and prompt.tool_choice != "none":
        yield InvalidField(f'tools: {whose} calls none; leave them out, or set tool_choice to "none"', field="tools")


def _prompt(graph: str, asked: GenerationRequest) -> bytes:
    match asked.prompt:
        case str() as text:
            return _encoded(text)
        case Conversation(messages=messages):
            return _encoded(_last_of_user(messages))
        case _:
            message = f'prompt: "{graph}" is a graph of user code, which takes a text'
            raise InvalidField(message, field="prompt", got="numbers of tokens")


def _messages(graph: str, asked: GenerationRequest) -> bytes:
    if isinstance(asked.prompt, Conversation):
        messages = [dict(message) for message in asked.prompt.messages]
    else:
        messages = [{"role": "user", "content": _prompt(graph, asked).decode()}]
    return _encoded(json.dumps(messages, ensure_ascii=False))


def _last_of_user(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            return str(message.get("content") or "")
    roles = ", ".join(str(message.get("role"))[:20] for message in messages[-8:])
    raise InvalidField('messages: expected one with the role "user"', field="messages", got=roles or "none")


def _encoded(text: str) -> bytes:
    # Half of a surrogate pair, which user code could not decode, is no reason to refuse what else was said.
    return text.encode(errors="replace")


def _add(request: InferRequest, name: str, data: bytes) -> None:
    # As `/generate` gives a text: its bytes alone, without the length that clients of tensors write in front.
    request.inputs.append(InferInput(name, BYTES.name, (len(data),)))
    request.raw_inputs.append(data)


# ----------------------------------------------------------------------
# A graph that makes a text: packets of its outputs as pieces, until its end, a stop string, or enough of it
# ----------------------------------------------------------------------

_LATE: Final = "the deadline passed before the graph had made the whole text"


def no_chat(graph: str) -> str:
    """Say that a graph answers no chats, and what to do."""
    return (
        f'the graph "{graph}" answers no chats: expected a Python node with a LOOPBACK, one input and one or two '
        "outputs of Python tensors; name others by a comment in its file: # OVMSTRIO_CHAT: prompt=INPUT text=OUTPUT"
    )


class OpenSaid(Protocol):
    """Opens a stream of a graph that gives what its outputs say; see ``GraphServable.open_stream``."""

    def __call__(
        self, first: InferRequest, *, parameters: Mapping[str, ParameterValue]
    ) -> AbstractAsyncContextManager[GraphStream[Said]]:
        """Open it with its first request; ``parameters`` are seen by user code."""
        ...


@asynccontextmanager
async def generate_text(
    graph: str, roles: ChatRoles, open_said: OpenSaid, asked: GenerationRequest
) -> AsyncIterator[GraphGeneration]:
    """Make one text; leaving the block closes the generator.

    Raises:
        InvalidRequest: on entering, what graphs cannot do was asked for.
        DeadlineExceeded: the deadline has passed.
        ServerError: on entering, or from the iteration, when the graph fails.

    Ownership: the graph's instance, until the block is left.
    Cancellation: anywhere; everything that runs for the text is stopped before this returns.
    """
    first = chat_request(graph, roles, asked)
    is_left = False
    with trio.CancelScope(deadline=asked.deadline) as scope:
        try:
            async with open_said(first, parameters=sampling_parameters(asked)) as stream:
                # The iteration tells from now on that it is late, where its reader expects to be told.
                scope.deadline = math.inf
                stream.end()
                yield GraphGeneration(graph, roles, stream, asked)
                is_left = True
        except ServerError:
            # The reader has been told, or has had all that it wanted.
            if not is_left:
                raise
    if scope.cancelled_caught:
        raise DeadlineExceeded(_LATE)


class GraphGeneration:
    """One text of a graph; see :class:`ovmstrio.core.generation.Generation`.

    A piece comes with each packet of text, and counts as a token, unless an output tells how many there were.
    """

    def __init__(self, graph: str, roles: ChatRoles, stream: GraphStream[Said], asked: GenerationRequest) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._graph = graph
        self._roles = roles
        self._stream = stream
        self._deadline = asked.deadline
        self._most = asked.sampling.max_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(asked.stop, keeps=asked.keeps_stop)
        self._packets = 0
        self._counted = 0
        self._told_tokens: int | None = None
        self._has_finished = False

    def __aiter__(self) -> Self:
        """Give the pieces, of which the last has a ``finish``."""
        return self

    async def __anext__(self) -> Piece:
        """Give the next piece.

        Raises:
            DeadlineExceeded: the deadline has passed.
            ServerError: the graph failed.

        Cancellation: while there is none; no text is lost.
        """
        if self._has_finished:
            raise StopAsyncIteration
        while True:
            said = await self._receive()
            if said is None or said.output == self._roles.end:
                return await self._end(said)
            if said.output == self._roles.usage:
                self._note_usage(said.data)
            elif said.output == self._roles.text:
                return self._piece(said.data)

    async def _receive(self) -> Said | None:
        """Wait for what the graph says next; None behind the last."""
        with trio.CancelScope(deadline=self._deadline):
            return await self._stream.receive()
        raise DeadlineExceeded(_LATE)

    def _piece(self, data: bytes) -> Piece:
        self._packets += 1
        text = self._stops.feed(self._decoder.decode(data))
        if self._stops.has_stopped:
            return self._last(text, Finish.STOP)
        if self._most is not None and self._packets >= self._most:
            return self._last(text + self._rest(), Finish.LENGTH)
        tokens = 0 if self._roles.usage else 1
        self._counted += tokens
        return Piece(text=text, tokens=tokens)

    async def _end(self, said: Said | None) -> Piece:
        """Make the last piece at the graph's own end; what it used may come behind that."""
        while said is not None and self._roles.usage and self._told_tokens is None:
            said = await self._receive()
            if said is not None and said.output == self._roles.usage:
                self._note_usage(said.data)
        is_full = self._most is not None and self._told_tokens is not None and self._told_tokens >= self._most
        return self._last(self._rest(), Finish.LENGTH if is_full else Finish.STOP)

    def _rest(self) -> str:
        """Give what was held back of letters and stop strings."""
        return self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.finish()

    def _last(self, text: str, finish: Finish) -> Piece:
        self._has_finished = True
        total = self._packets if self._told_tokens is None else self._told_tokens
        return Piece(text=text, tokens=max(0, total - self._counted), finish=finish)

    def _note_usage(self, data: bytes) -> None:
        """Take the counts of an output ``usage``, as far as it has some."""
        try:
            told: Any = orjson.loads(data)
            counts = [told.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
        except (ValueError, AttributeError):
            counts = [-1]
        if not all(count is None or (type(count) is int and count >= 0) for count in counts):
            found = data[:80].decode(errors="replace")
            raise GraphFailure(
                f'the output "{self._roles.usage}" of the graph "{self._graph}" does not tell its usage: expected JSON '
                f'as {{"prompt_tokens": 7, "completion_tokens": 12}}, got {found}'
            )
        prompt, self._told_tokens, cached = counts
        self.prompt_tokens, self.cached_tokens = prompt or 0, cached or 0


# ----------------------------------------------------------------------
# Packets of a graph's outputs as bytes of text
# ----------------------------------------------------------------------

_BYTES_OF_TEXT: Final = frozenset({"BYTES", "UINT8", "INT8"})


class Said(NamedTuple):
    """What came out of an output: the output's name, and the bytes."""

    output: str
    data: bytes


class SaidMaker:
    """Makes texts of packets; ``outputs`` are the graph's, by number."""

    def __init__(self, graph: str, outputs: Sequence[str]) -> None:
        self._graph = graph
        self._outputs = outputs

    def __call__(self, output: int, packet: Packet) -> Said:
        """Take the bytes of a packet; elements behind their lengths are joined.

        Raises:
            GraphFailure: it carries numbers, or is no tensor.
        """
        name = self._outputs[output]
        made = to_output(name, packet.value)
        is_text = isinstance(made, RawTensor) and (
            made.datatype in _BYTES_OF_TEXT or made.datatype not in BY_NAME  # of a type of the user's own
        )
        if not isinstance(made, RawTensor) or not is_text:
            found = str(made.datatype) if isinstance(made, RawTensor) else type(made).__name__
            raise GraphFailure(
                f'the output "{name}" of the graph "{self._graph}" is no text: expected bytes of UTF-8, as in '
                f"Tensor({name!r}, text.encode()), got {found}"
            )
        return Said(name, _joined(made) if made.datatype == BYTES.name else bytes(made.data))


def _joined(tensor: RawTensor) -> bytes:
    """Join elements that are each behind their length; bytes that are not made so are the text itself."""
    given = InferInput(tensor.name, BYTES.name, tensor.shape)
    try:
        return b"".join(elements_of(given, tensor.data, described(given, BYTES)))
    except InvalidRequest:
        return bytes(tensor.data)
