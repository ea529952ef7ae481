"""What chat, completions and responses have in common: a body is read, texts are generated, and they are written.

::

    body ─> TextEndpoint.read ─> Asked ─> generate ─┬─> Whole ─> one document
                                                    └─> Streamed ─> events, as pieces come
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast
from uuid import uuid4

import trio

from ovmstrio.core.errors import InvalidField, ServerError
from ovmstrio.core.generation import Task
from ovmstrio.protocols.openai.deltas import DONE, JoinedText, write_event
from ovmstrio.protocols.openai.fields import type_of
from ovmstrio.protocols.openai.raw_http_routes import answer_payload, takes_payloads
from ovmstrio.serving.calls import open_generation
from ovmstrio.transport.http.deadlines import deadline_of
from ovmstrio.transport.http.event_streams import answer_with_events
from ovmstrio.transport.http.responses import json_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ovmstrio.core.generation import GenerationLimits, GenerationRequest, Piece, TextGenerator
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.transport.http.event_streams import EventSink
    from ovmstrio.transport.http.router import Rule

__all__ = [
    "Asked",
    "EventsOfTexts",
    "Streamed",
    "TextEndpoint",
    "Usage",
    "Whole",
    "WholeTexts",
    "answer_head",
    "generate_all",
    "is_stream",
    "read_apart",
    "text_rules",
]

# ----------------------------------------------------------------------
# What chat, completions and responses have in common: a body is read, texts are generated, and they are written
# ----------------------------------------------------------------------

_T = TypeVar("_T")

_AT_ONCE_BYTES: Final = 2**18
"""Of a body that is read on the event loop."""
_AT_ONCE: Final = 32
"""How many prompts of one body are given to the service at a time."""


class Asked(NamedTuple):
    """What one body asks for: a request a prompt, and what is told of them while they are answered.

    ``tells_usage`` asks for an account behind the last event, ``counts_on`` for one in each.
    """

    requests: tuple[GenerationRequest, ...]
    tells_usage: bool = False
    counts_on: bool = False


@dataclass(slots=True)
class Usage:
    """How many tokens were read, found in a cache among them, made, and for reasoning among these."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def document(self) -> dict[str, Any]:
        """Tell it as chat and completions do."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Whole(Protocol):
    """Takes the pieces of an answer that is given at once; ``index`` counts the texts of all prompts."""

    def take(self, index: int, piece: Piece) -> None:
        """Take one more piece."""
        ...

    def document(self, usage: Usage) -> Mapping[str, Any]:
        """Give the answer."""
        ...


class Streamed(Protocol):
    """Writes pieces as events, when they come."""

    def begin(self) -> bytes:
        """Write what comes first, once a prompt has been accepted; nothing leaves errors a status of their own."""
        ...

    def write(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Write one more piece; nothing where there is nothing to tell."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Write the end."""
        ...

    def fail(self, error: Exception) -> bytes:
        """Write a failure, which is the end."""
        ...


class TextEndpoint(Protocol):
    """A path that makes text, with the form of its bodies and answers."""

    def read(self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float) -> Asked:
        """Read a body.

        Raises:
            InvalidField: it cannot be served; all that is wrong is told.
        """
        ...

    def whole(self, body: Body, asked: Asked) -> Whole:
        """Make what gathers an answer."""
        ...

    def streamed(self, body: Body, asked: Asked, write_error: Callable[[Exception], bytes]) -> Streamed:
        """Make what writes events; ``write_error`` does in the form of the server's choice."""
        ...


def text_rules(api: OpenAIApi, path: str, endpoint: TextEndpoint) -> list[Rule]:
    """Make the rules of one such path."""

    async def answer(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request)
        if takes_payloads(api.plane, body.model):
            answered = await answer_payload(api, request, path.removeprefix("/"))
            if answered is not None:
                return answered
        if is_stream(body):
            answering = _Answering(api, endpoint, request, body)
            return await answer_with_events(request, answering.stream, answering.fail)
        return await _answer_whole(api, endpoint, request, body)

    return api.rules(path, "POST", answer, has_tasks=True)


def is_stream(body: Body) -> bool:
    """Tell whether a body asks for events.

    Raises:
        InvalidField: it says something else than yes or no.
    """
    stream = body.document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidField("stream field is not a boolean", field="stream", got=type_of(stream))
    return bool(stream)


async def _answer_whole(api: OpenAIApi, endpoint: TextEndpoint, request: HttpRequest, body: Body) -> HttpAnswer:
    deadline = deadline_of(request)
    with await api.call(request, body.model, Task.TEXT_GENERATION) as call:
        read = partial(endpoint.read, body.document, _model(call).limits, is_stream=False, deadline=deadline)
        asked = await read_apart(read, body)
        whole, usage = endpoint.whole(body, asked), Usage()

        async def take(index: int, piece: Piece) -> None:
            whole.take(index, piece)

        await generate_all(_model(call), asked.requests, usage, take)
        answer = json_answer(whole.document(usage))
        call.event.sent = len(answer.content)
        return answer


class _Answering:
    """Makes the events of one request."""

    def __init__(self, api: OpenAIApi, endpoint: TextEndpoint, request: HttpRequest, body: Body) -> None:
        self._api = api
        self._endpoint = endpoint
        self._request = request
        self._body = body
        self._streamed: Streamed | None = None

    def fail(self, error: Exception) -> bytes:
        """Write what has ended them."""
        return self._api.form.event(error) if self._streamed is None else self._streamed.fail(error)

    async def stream(self, events: EventSink) -> None:
        """Send them."""
        deadline = deadline_of(self._request)
        with await self._api.call(self._request, self._body.model, Task.TEXT_GENERATION, is_stream=True) as call:
            limits = _model(call).limits
            read = partial(self._endpoint.read, self._body.document, limits, is_stream=True, deadline=deadline)
            asked = await read_apart(read, self._body)
            streamed = self._endpoint.streamed(self._body, asked, self._api.form.event)
            self._streamed = streamed
            usage = Usage()

            async def send(data: bytes) -> None:
                if data:
                    call.event.sent += len(data)
                    await events.send(data)

            async def take(index: int, piece: Piece) -> None:
                await send(streamed.write(index, piece, usage))

            await generate_all(_model(call), asked.requests, usage, take, lambda: send(streamed.begin()))
            await send(streamed.end(usage))


async def read_apart(read: Callable[[], _T], body: Body) -> _T:
    """Read a body; a large one in a thread, so that others have their turn meanwhile.

    Raises:
        InvalidField: as ``read``.

    Cancellation: not while a thread reads, which is bounded by the size of the body.
    """
    if body.size <= _AT_ONCE_BYTES:
        return read()
    return await trio.to_thread.run_sync(read)


def _model(call: ObservedCall) -> TextGenerator:
    return cast("TextGenerator", call.service)


async def generate_all(
    model: TextGenerator,
    requests: Sequence[GenerationRequest],
    usage: Usage,
    take: Callable[[int, Piece], Awaitable[None]],
    begin: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
) -> None:
    """Give the pieces of all requests to ``take``, and count them in ``usage``.

    Raises:
        ServerError: the first failure; the other requests are cancelled.

    Cancellation: all requests are.
    """

    async def run(position: int, asked: GenerationRequest) -> None:
        async with open_generation(model, asked) as generation:
            prompt, cached = generation.prompt_tokens, generation.cached_tokens
            usage.prompt += prompt
            usage.cached += cached
            await begin()
            async for piece in generation:
                usage.completion += piece.tokens
                usage.reasoning += piece.reasoning_tokens
                await take(position * asked.n + piece.index, piece)
            # Code of users tells at its end what it has read.
            usage.prompt += generation.prompt_tokens - prompt
            usage.cached += generation.cached_tokens - cached

    if len(requests) == 1:
        await run(0, requests[0])
        return
    left = iter(enumerate(requests))

    async def run_some() -> None:
        for position, asked in left:
            await run(position, asked)

    failed = None
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(min(_AT_ONCE, len(requests))):
                nursery.start_soon(run_some)
    except* ServerError as group:
        failed = _first(group)
    if failed is not None:
        raise failed


def _first(error: BaseException) -> BaseException:
    """Give the first of what went wrong side by side."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.with_traceback(None)


# ----------------------------------------------------------------------
# What answers of chat and of completions have in common: their heads, and the frames of their events
# ----------------------------------------------------------------------


def answer_head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Begin an answer: a new name, when it was made (seconds since 1970), and the model as the body names it."""
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class WholeTexts:
    """Texts that are given at once.

    Args:
        model: as the body names it.
        texts: how many there are, of all prompts.
        has_logprobs: whether tokens come with their probabilities.
    """

    def __init__(self, model: str, texts: int, *, has_logprobs: bool) -> None:
        self._model = model
        self._texts = [JoinedText() for _ in range(texts)]
        self._has_logprobs = has_logprobs

    def take(self, index: int, piece: Piece) -> None:
        """Take one more piece."""
        self._texts[index].take(piece)


class EventsOfTexts:
    """An answer as events, each with what has come of one text.

    Args:
        head: what every event says.
        asked: what the body asks for.
        write_error: writes a failure.
    """

    def __init__(self, head: Mapping[str, Any], asked: Asked, write_error: Callable[[Exception], bytes]) -> None:
        self._head = head
        self._asked = asked
        self._has_logprobs = asked.requests[0].logprobs
        self._write_error = write_error

    def begin(self) -> bytes:
        """Write nothing: a failure before the first token has a status."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Write the account, if it is asked for, and the end."""
        if not self._asked.tells_usage:
            return DONE
        return write_event({**self._head, "choices": [], "usage": usage.document()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Write a failure; what follows is the end of the stream."""
        return self._write_error(error)

    def _event(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._asked.tells_usage:
            document["usage"] = usage.document() if self._asked.counts_on else None
        return write_event(document)
