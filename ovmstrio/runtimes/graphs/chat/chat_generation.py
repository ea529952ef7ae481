"""A graph that makes a text: packets of its outputs as pieces, until its end, a stop string, or enough of it.

::

    GenerationRequest ─> chat_request ─> instance of the graph ─> Said ... ─> GraphGeneration ─> Piece ...

The replies' channel has a bound, so that a client who does not read holds up its own generator and nothing else.
"""

from __future__ import annotations

import codecs
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
import trio

from ovmstrio.core.errors import DeadlineExceeded, GraphFailure, ServerError
from ovmstrio.core.generation import Finish, Piece
from ovmstrio.core.stop_strings import StopStrings
from ovmstrio.runtimes.graphs.chat.chat_requests import chat_request, sampling_parameters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.core.request import InferRequest, ParameterValue
    from ovmstrio.runtimes.graphs.chat.said import Said
    from ovmstrio.runtimes.graphs.config.graph_config import ChatRoles
    from ovmstrio.runtimes.graphs.graph_stream import GraphStream

__all__ = ["GraphGeneration", "generate_text", "no_chat"]

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
