"""Base of chat, completions and responses: parse a body, generate text, encode the response.

::

    body ─> TextEndpoint.read ─> ParsedRequest ─> generate_all ─┬─> _ResponseBuilder ─> one document
                                                                └─> _ResponseStream ─> events, as deltas arrive
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast
from uuid import uuid4

import orjson
import trio

from ovmstrio.core.errors import InvalidField, ServerError
from ovmstrio.core.generation import Finish, Task
from ovmstrio.protocols.openai.api import DONE, encode_event
from ovmstrio.protocols.openai.fields import type_of
from ovmstrio.protocols.openai.raw_http_routes import accepts_raw_requests, answer_raw_request
from ovmstrio.serving.generation_calls import open_generation
from ovmstrio.transport.http.responses import json_response, request_deadline
from ovmstrio.transport.http.sse import EventSink, stream_events

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from ovmstrio.core.generation import (
        GenerationChunk,
        GenerationLimits,
        GenerationRequest,
        TextGenerator,
        TokenLogprob,
    )
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.protocols.openai.known_fields import KnownFields
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.transport.http.router import Rule

_T = TypeVar("_T")

_MAX_INLINE_BYTES: Final = 2**18  # Maximum size of a body that is parsed on the event loop
_MAX_CONCURRENT_PROMPTS: Final = 32  # Maximum number of concurrent prompts of one body


def token_text(token: TokenLogprob) -> str:
    r"""Return the text of a token; a part of a character is written as ``bytes:\xe6\x97``, as by OpenAI."""
    return _shown_bytes(token.data)


def _shown_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def top_logprobs(token: TokenLogprob) -> dict[str, float] | None:
    """Return the most likely tokens and the token itself, by text; None if the most likely ones are unknown."""
    if token.logprob is None or not token.top:
        return None
    return {_shown_bytes(each.data): each.logprob for each in token.top} | {token_text(token): token.logprob}


def logprob_document(token: TokenLogprob, top: int) -> dict[str, Any]:
    """Return a token's log probability, with ``top`` most likely tokens."""
    value = token.logprob if token.logprob is not None else 0.0
    return {**_alternative(token.data, value), "top_logprobs": [_alternative(*each[:2]) for each in token.top[:top]]}


def _alternative(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _shown_bytes(data), "logprob": logprob, "bytes": list(data)}


def prompt_logprobs_document(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return the log probabilities of a prompt in vLLM's form: of each token and the most likely ones, by token id."""
    return [None if token.logprob is None else _ranked(token, token.logprob) for token in tokens]


def _ranked(token: TokenLogprob, logprob: float) -> dict[str, Any]:
    ranked = [(token.rank, token.data, logprob, token.id)]
    ranked += ((rank, *each) for rank, each in enumerate(token.top, 1) if each.id != token.id)
    return {
        str(number): {"logprob": value, "rank": rank, "decoded_token": data.decode(errors="replace")}
        for rank, data, value, number in ranked
    }


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a tool call as an object; None if they are no JSON object."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the reasoning under both names that clients know: DeepSeek's and that of later versions of vLLM."""
    return {"reasoning_content": text, "reasoning": text}


@dataclass(slots=True)
class ChoiceText:
    """Everything generated for one choice."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish = Finish.STOP

    def take(self, piece: GenerationChunk) -> None:
        """Append a delta."""
        self.text.append(piece.text)
        self.reasoning.append(piece.reasoning)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        for delta in piece.calls:
            call = self.calls.setdefault(delta.index, {"id": "", "name": "", "arguments": []})
            call["id"] = call["id"] or delta.id
            call["name"] = call["name"] or delta.name
            call["arguments"].append(delta.arguments)
        self.finish = piece.finish or self.finish

    def message(self) -> dict[str, Any]:
        """Return the chat message; a message with tool calls and no text has null content."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self.calls else ""),
            "refusal": None,
        }
        if reasoning:
            message |= reasoning_fields(reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self.calls.items())
            ]
        return message


class ParsedRequest(NamedTuple):
    """Parsed body: a request per prompt; usage at the end or in every chunk (``has_continuous_usage``).

    Attributes:
        returns_reasoning: whether the response has the reasoning.
        shows_token_ids: whether log-probabilities name tokens by their numbers.
        echoed: text before the generated one.
    """

    requests: tuple[GenerationRequest, ...]
    includes_usage: bool = False
    has_continuous_usage: bool = False
    returns_reasoning: bool = True
    shows_token_ids: bool = False
    echoed: str = ""

    def returned(self, piece: GenerationChunk) -> GenerationChunk:
        """Return the part of a delta that the response has."""
        if piece.reasoning and not self.returns_reasoning:
            piece = replace(piece, reasoning="")
        if piece.logprobs and self.shows_token_ids:
            piece = replace(piece, logprobs=tuple(map(_with_ids, piece.logprobs)))
        return piece


def _with_ids(token: TokenLogprob) -> TokenLogprob:
    top = tuple(each._replace(data=b"token_id:%d" % each.id) for each in token.top)
    return replace(token, data=b"token_id:%d" % token.id, top=top)


@dataclass(slots=True)
class Usage:
    """Token counts: prompt, cached prompt, completion, and reasoning (part of the completion)."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def document(self) -> dict[str, Any]:
        """Return the usage in the form of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class _ResponseBuilder(Protocol):
    """Builder of a complete response; ``index`` counts the choices of all prompts."""

    def take(self, index: int, piece: GenerationChunk) -> None: ...

    def document(self, usage: Usage) -> Mapping[str, Any]: ...


class _ResponseStream(Protocol):
    """Encoder of deltas as events."""

    def begin(self, usage: Usage) -> bytes:
        """Encode the first events, once a prompt is accepted; if empty, errors still have an HTTP status."""
        ...

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def fail(self, error: Exception) -> bytes: ...


class EventRecorder(Protocol):
    """Receiver of events without a client."""

    async def send(self, data: bytes) -> None:
        """Take encoded events."""
        ...


class TextEndpoint(Protocol):
    """Text generation endpoint: format of bodies and responses."""

    @property
    def known_fields(self) -> KnownFields:
        """Fields of bodies."""
        ...

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body; raise ``InvalidField`` with all problems."""
        ...

    def response_builder(self, body: Body, parsed: ParsedRequest) -> _ResponseBuilder:
        """Create a response builder."""
        ...

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> _ResponseStream:
        """Create an event encoder; ``write_error`` encodes errors in the configured format."""
        ...


def text_rules(api: OpenAIApi, path: str, endpoint: TextEndpoint) -> list[Rule]:
    """Return the routes of an endpoint."""

    async def answer(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, endpoint.known_fields)
        if accepts_raw_requests(api.plane, body.model):
            answered = await answer_raw_request(api, request, path.removeprefix("/"))
            if answered is not None:
                return answered
        return await answer_text(api, endpoint, request, body)

    return api.rules(path, "POST", answer, has_tasks=True)


async def answer_text(api: OpenAIApi, endpoint: TextEndpoint, request: HttpRequest, body: Body) -> HttpAnswer:
    """Generate text and answer with one document, or with events if the body requests a stream."""
    if is_stream(body):
        stream = TextEventStream(api, endpoint, request, body)
        return await stream_events(
            request, stream.stream, stream.fail, api.stream_headers, keep_alive_seconds=api.keep_alive_seconds
        )
    return await _answer_complete(api, endpoint, request, body)


def is_stream(body: Body) -> bool:
    """Return whether a body requests events; raise ``InvalidField`` unless it is a boolean."""
    stream = body.document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidField("stream field is not a boolean", field="stream", got=type_of(stream))
    return bool(stream)


async def _answer_complete(api: OpenAIApi, endpoint: TextEndpoint, request: HttpRequest, body: Body) -> HttpAnswer:
    deadline = request_deadline(request)
    with await api.call(request, body.model, Task.TEXT_GENERATION) as call:
        read = partial(endpoint.read, body.document, _model(call).limits, is_stream=False, deadline=deadline)
        parsed = await parse_off_loop(read, body)
        builder, usage = endpoint.response_builder(body, parsed), Usage()

        async def take(index: int, piece: GenerationChunk) -> None:
            builder.take(index, piece)

        await generate_all(_model(call), parsed.requests, usage, take)
        answer = json_response(builder.document(usage))
        call.event.sent = len(answer.content)
        return answer


class TextEventStream:
    """Events of one request, which :meth:`stream` generates and sends.

    Attributes:
        on_parsed: called once the body is parsed; None for nothing.
    """

    def __init__(self, api: OpenAIApi, endpoint: TextEndpoint, request: HttpRequest, body: Body) -> None:
        self._api = api
        self._endpoint = endpoint
        self._request = request
        self._body = body
        self._streamed: _ResponseStream | None = None
        self.on_parsed: Callable[[], Awaitable[None]] | None = None

    def fail(self, error: Exception) -> bytes:
        """Encode a failure, which ends the events."""
        return self._api.form.event(error) if self._streamed is None else self._streamed.fail(error)

    async def stream(self, events: EventSink | EventRecorder) -> None:
        """Generate text and send its events; raises ServerError as the model."""
        deadline = request_deadline(self._request)
        with await self._api.call(self._request, self._body.model, Task.TEXT_GENERATION, is_stream=True) as call:
            limits = _model(call).limits
            read = partial(self._endpoint.read, self._body.document, limits, is_stream=True, deadline=deadline)
            parsed = await parse_off_loop(read, self._body)
            streamed = self._endpoint.response_stream(self._body, parsed, self._api.form.event)
            self._streamed = streamed
            if self.on_parsed is not None:
                await self.on_parsed()
            usage = Usage()

            async def send(data: bytes) -> None:
                if data:
                    call.event.sent += len(data)
                    await events.send(data)

            async def take(index: int, piece: GenerationChunk) -> None:
                await send(streamed.write(index, piece, usage))

            await generate_all(
                _model(call),
                parsed.requests,
                usage,
                take,
                begin=lambda: send(streamed.begin(usage)),
                take_now=partial(_write_now, events, call, streamed, usage) if isinstance(events, EventSink) else None,
            )
            await send(streamed.end(usage))


def _write_now(
    events: EventSink,
    call: ObservedCall,
    streamed: _ResponseStream,
    usage: Usage,
    pieces: Iterable[tuple[int, GenerationChunk]],
) -> bool:
    """Encode and send deltas, unless the client has not taken the earlier ones; return whether they were sent."""
    if not events.can_send_now:
        return False
    data = b"".join([streamed.write(index, piece, usage) for index, piece in pieces])
    call.event.sent += len(data)
    events.send_now(data)
    return True


async def parse_off_loop(read: Callable[[], _T], body: Body) -> _T:
    """Parse a body, a large one in a worker thread, which cannot be cancelled."""
    if body.size <= _MAX_INLINE_BYTES:
        return read()
    return await trio.to_thread.run_sync(read)


def _model(call: ObservedCall) -> TextGenerator:
    return cast("TextGenerator", call.service)


async def generate_all(
    model: TextGenerator,
    requests: Sequence[GenerationRequest],
    usage: Usage,
    take: Callable[[int, GenerationChunk], Awaitable[None]],
    *,
    begin: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    take_now: Callable[[Iterable[tuple[int, GenerationChunk]]], bool] | None = None,
) -> None:
    """Pass the deltas of all requests to ``take`` and count tokens; the first failure cancels the other requests.

    ``take_now`` saves task switches: it gets the deltas that have arrived together, and returns False without counting
    any if ``take`` must get them.
    """

    def counted(position: int, request: GenerationRequest, piece: GenerationChunk) -> tuple[int, GenerationChunk]:
        usage.completion += piece.tokens
        usage.reasoning += piece.reasoning_tokens
        return position * request.n + piece.index, piece

    async def run(position: int, request: GenerationRequest) -> None:
        count = partial(counted, position, request)
        async with open_generation(model, request) as generation:
            prompt, cached = generation.prompt_tokens, generation.cached_tokens
            usage.prompt += prompt
            usage.cached += cached
            await begin()
            if take_now is not None:
                generation.listen(lambda pieces: take_now(map(count, pieces)))
            async for piece in generation:
                await take(*count(piece))
            # User code reports its prompt tokens at the end.
            usage.prompt += generation.prompt_tokens - prompt
            usage.cached += generation.cached_tokens - cached

    if len(requests) == 1:
        await run(0, requests[0])
    else:
        await _run_all(run, requests)


async def _run_all(
    run: Callable[[int, GenerationRequest], Awaitable[None]], requests: Sequence[GenerationRequest]
) -> None:
    pending = iter(enumerate(requests))

    async def run_some() -> None:
        for position, request in pending:
            await run(position, request)

    failure = None
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(min(_MAX_CONCURRENT_PROMPTS, len(requests))):
                nursery.start_soon(run_some)
    except* ServerError as group:
        failure = _first_error(group)
    if failure is not None:
        raise failure


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.with_traceback(None)


# Common parts of chat and completions


def response_head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the common fields of a response: new id, creation time, and the model name in the body."""
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class ResponseBuilder:
    """Base of response builders."""

    def __init__(self, model: str, parsed: ParsedRequest) -> None:
        self._model = model
        self._parsed = parsed
        first = parsed.requests[0]
        self._texts = [ChoiceText([parsed.echoed]) for _ in range(len(parsed.requests) * first.n)]
        self._has_logprobs = first.logprobs
        self._top_logprobs = first.top_logprobs
        self._has_prompt_logprobs = first.prompt_logprobs is not None

    def take(self, index: int, piece: GenerationChunk) -> None:
        """Append a delta."""
        self._texts[index].take(self._parsed.returned(piece))


class ChunkStream:
    """Base of event encoders; ``head`` has the fields common to all events."""

    def __init__(
        self, head: Mapping[str, Any], parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> None:
        self._head = head
        self._parsed = parsed
        self._has_logprobs = parsed.requests[0].logprobs
        self._write_error = write_error
        self._text_start = b'data: %b,"choices":[{"index":' % orjson.dumps(head)[:-1]
        usage = b',"usage":null' if parsed.includes_usage else b""
        self._text_end = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % usage

    def begin(self, usage: Usage) -> bytes:
        """Return nothing: an error before the first token has an HTTP status."""
        del usage
        return b""

    def end(self, usage: Usage) -> bytes:
        """Encode the usage, if requested, and the end marker."""
        if not self._parsed.includes_usage:
            return DONE
        return encode_event({**self._head, "choices": [], "usage": usage.document()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Encode a failure, which ends the stream."""
        return self._write_error(error)

    def _has_text_only(self, piece: GenerationChunk) -> bool:
        """Return True for most deltas: those that :meth:`_text_event` encodes."""
        has_more = piece.finish or piece.logprobs or piece.reasoning or piece.calls
        return not has_more and not self._parsed.has_continuous_usage

    def _text_event(self, index: int, before: bytes, text: str, after: bytes = b"") -> bytes:
        """Encode text of a choice as :meth:`_event` would, from constant parts around it."""
        return b"%b%d,%b%b%b%b" % (self._text_start, index, before, orjson.dumps(text), after, self._text_end)

    def _event(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._parsed.includes_usage:
            document["usage"] = usage.document() if self._parsed.has_continuous_usage else None
        return encode_event(document)
