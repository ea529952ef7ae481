"""Adapter of the text endpoints for graph nodes: sends JSON documents to a callback instead of an HTTP response.

::

    path, body ─> endpoint ─> generate ─┬─> one document
                                        └─> one document per event, without event framing and end marker
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.core.callers import current_quota
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.payloads import RawDocument
from ovmstrio.protocols.anthropic.messages import Messages
from ovmstrio.protocols.ollama.chat import CHAT_ENDPOINT
from ovmstrio.protocols.ollama.generate import GENERATE_ENDPOINT
from ovmstrio.protocols.openai.api import Body, OpenAIErrors, model_name, read_document
from ovmstrio.protocols.openai.chat import Chat
from ovmstrio.protocols.openai.completions import Completions
from ovmstrio.protocols.openai.responses import Responses
from ovmstrio.protocols.openai.text_endpoint import Usage, generate_all, is_stream, parse_off_loop
from ovmstrio.transport.http.responses import json_response, request_deadline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from ovmstrio.core.generation import GenerationChunk, TextGenerator
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, TextEndpoint

_JSON: Final = "application/json"
_OBJECT: Final = b"{"  # begins a line of Ollama's streams
_DATA: Final = b"data: "
_END: Final = b"[DONE]"
_ENDPOINTS: Final[dict[str, TextEndpoint]] = {
    "/chat/completions": Chat(),
    "/completions": Completions(),
    "/responses": Responses(),
    "/messages": Messages(),
    "/api/chat": CHAT_ENDPOINT,
    "/api/generate": GENERATE_ENDPOINT,
}


class GraphTextApi:
    """Text endpoints for graph nodes; see :class:`ovmstrio.core.payloads.TextApiAdapter`."""

    async def answer(
        self, model: TextGenerator, name: str, request: HttpRequest, send: Callable[[RawDocument], Awaitable[None]]
    ) -> None:
        """Answer a request with a model; the path selects the endpoint.  The caller is charged for the tokens."""
        endpoint = _endpoint_of(request.path)
        # Other fields may be those of the graph's other nodes.
        document = endpoint.known_fields.without_unknown(await read_document(request.body))
        body = Body(document, model_name({"model": name, **document}), len(request.body))
        allowance = current_quota()
        if allowance is not None:
            allowance.check_tokens()
        deadline = request_deadline(request)
        read = partial(endpoint.read, document, model.limits, is_stream=is_stream(body), deadline=deadline)
        await _answer(endpoint, model, body, await parse_off_loop(read, body), send)


def _endpoint_of(path: str) -> TextEndpoint:
    # Of two paths with a common ending the longer one is listed first.
    for known, endpoint in _ENDPOINTS.items():
        if path.endswith(known):
            return endpoint
    raise NotSupported(f"expected a path of text generation ({', '.join(_ENDPOINTS)}), got {path:.80}")


async def _answer(
    endpoint: TextEndpoint,
    model: TextGenerator,
    body: Body,
    parsed: ParsedRequest,
    send: Callable[[RawDocument], Awaitable[None]],
) -> None:
    """Generate the answer and send it as one document, or for a stream as one document per event."""
    usage = Usage()
    generate = partial(generate_all, model, parsed.requests, usage)
    if not is_stream(body):
        builder = endpoint.response_builder(body, parsed)

        async def collect(index: int, piece: GenerationChunk) -> None:
            builder.take(index, piece)

        await generate(collect)
        await send(RawDocument(json_response(builder.document(usage)).content, _JSON))
        return
    streamed = endpoint.response_stream(body, parsed, OpenAIErrors().event)

    async def send_all(events: bytes) -> None:
        for data in _data_of(events):
            await send(RawDocument(data, _JSON))

    async def send_piece(index: int, piece: GenerationChunk) -> None:
        await send_all(streamed.write(index, piece, usage))

    await generate(send_piece, begin=lambda: send_all(streamed.begin(usage)))
    await send_all(streamed.end(usage))


def _data_of(events: bytes) -> Iterator[bytes]:
    """Yield the documents of encoded events or lines, without the end marker."""
    for line in events.split(b"\n"):
        if line.startswith(_OBJECT):
            yield line
        elif line.startswith(_DATA) and not line.endswith(_END, len(_DATA)):
            yield line[len(_DATA) :]
