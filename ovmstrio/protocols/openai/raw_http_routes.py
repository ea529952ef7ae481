"""Pass-through of raw HTTP requests to services that accept them, such as graphs.

::

    /v3/anything ─> service named by "model" of a JSON body, else by the path ─> documents ─> one answer, or events

A client requests events by ``"stream": true`` in a JSON body, or by ``Accept``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from ovmstrio.auth.authentication import strip_credentials
from ovmstrio.core.errors import (
    GraphFailure,
    InvalidField,
    PayloadTooLarge,
    ServerError,
    ServiceMissing,
    VersionLoading,
)
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_reader import JsonLimitExceeded, JsonSyntaxError, parse_json, parse_strictly
from ovmstrio.protocols.openai.api import DONE
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import request_deadline
from ovmstrio.transport.http.sse import stream_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.payloads import RawDocument, RawHttpService
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.sse import EventSink

_EVENTS: Final = "text/event-stream"
_LINES: Final = ("content-type", "application/x-ndjson")
_JSON: Final = "application/json"
_TEXTS: Final = ("/chat/completions", "/completions")
_RESPONSES: Final = "/responses"
_NAMED: Final = (_RESPONSES, "/messages")  # Paths whose events have names
_DONE: Final = frozenset({b"[DONE]", b"data: [DONE]", b"data:[DONE]"})
"""Last line of a stream that ends itself, as a document or as an encoded event."""
_MAX_NAME_SEGMENTS: Final = 8
"""Number of path segments up to which a service's name with slashes is searched."""
_CHANGED_HEADERS: Final = frozenset({"content-encoding", "content-length"})


async def answer_raw_request(api: OpenAIApi, request: HttpRequest, path: str) -> HttpAnswer | None:
    """Pass a request to the service that it addresses; None if there is none.

    ``path`` is the path after the prefix; the route must have a nursery.  Raises ``PayloadTooLarge`` for request or
    response.
    """
    body = await decompressed_body(request, api.max_body_bytes)
    document = await _read_document(body)
    segments = path.split("/", _MAX_NAME_SEGMENTS)
    prefixes = ("/".join(segments[:count]) for count in range(len(segments), 0, -1))
    name = _find_service(api.plane, (document.get("model"), *prefixes))
    if not name:
        return None
    headers = tuple(line for line in strip_credentials(request.headers) if line[0] not in _CHANGED_HEADERS)
    answering = _RawCall(api, name, request._replace(body=body, headers=headers))
    try:
        if document.get("stream") is True or _EVENTS in (request.header("accept") or ""):
            return await stream_events(request, answering.stream, api.form.event, api.stream_headers)
        return await answering.answer_whole()
    except ServiceMissing:
        return None


async def _read_document(body: bytes) -> dict[str, Any]:
    """Return a JSON object body; an empty one for any other body."""
    if body[:1] not in b"{ \t\r\n":
        return {}
    try:
        document = await parse_json(body, parse=parse_strictly)
    except JsonSyntaxError:
        return {}
    except JsonLimitExceeded as error:
        raise InvalidField(f"JSON body: {error}") from None
    return document if isinstance(document, dict) else {}


def _small_document(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body) if body[:1] in b"{ \t\r\n" else None
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _find_service(plane: DataPlane, names: Sequence[Any]) -> str:
    """Return the first name of a service that accepts payloads or is still loading; empty if none."""
    for name in names:
        if not isinstance(name, str) or not name:
            continue
        try:
            call_types, service = plane.registry.call_types(name), plane.registry.peek(name)
        except VersionLoading:
            return name
        except ServerError:
            continue
        if CallType.PAYLOADS in call_types and cast("RawHttpService", service).accepts_payloads:
            return name
    return ""


def accepts_raw_requests(plane: DataPlane, name: str) -> bool:
    """Return whether a loaded service accepts raw HTTP requests."""
    try:
        service = plane.registry.peek(name) if CallType.PAYLOADS in plane.registry.call_types(name) else None
    except ServerError:
        return False
    return service is not None and cast("RawHttpService", service).accepts_payloads


class _RawCall:
    def __init__(self, api: OpenAIApi, name: str, request: HttpRequest) -> None:
        self._api = api
        self._name = name
        self._request = request

    async def _call(self, *, is_stream: bool) -> tuple[ObservedCall, RawHttpService]:
        request = self._request
        method = "Stream" if is_stream else "Unary"
        sent_id, size = request.header("x-request-id") or "", len(request.body)
        call = await self._api.plane.call(
            self._name, self._api.interface, method, request_id=sent_id, received=size, is_stream=is_stream
        )
        service = cast("RawHttpService", call.service)
        if CallType.PAYLOADS in call.call_types and service.accepts_payloads:
            return call, service
        with call:
            raise ServiceMissing(f'"{self._name}" does not accept HTTP requests')

    async def answer_whole(self) -> HttpAnswer:
        deadline = request_deadline(self._request)
        call, service = await self._call(is_stream=False)
        with call:
            found: list[RawDocument] = []
            size = 0
            async with service.open_payload(self._request, deadline) as documents:
                while (document := await documents.receive()) is not None:
                    found.append(document)
                    size += len(document.data)
                    if size > self._api.max_body_bytes:
                        raise PayloadTooLarge.of_outputs(size, self._api.max_body_bytes)
            answer = _join_documents(found)
            call.event.sent = len(answer.content)
            return answer

    async def stream(self, events: EventSink) -> None:
        """Send an event per document; text paths end with ``[DONE]``."""
        deadline = request_deadline(self._request)
        has_names = self._request.path.endswith(_NAMED)
        is_text = self._request.path.endswith((*_TEXTS, _RESPONSES))
        encode = _line if _LINES in self._api.stream_headers else partial(_event, has_name=has_names)
        call, service = await self._call(is_stream=True)
        with call:
            last = b""
            async with service.open_payload(self._request, deadline) as documents:
                while (document := await documents.receive()) is not None:
                    last = document.data
                    data = encode(document)
                    call.event.sent += len(data)
                    await events.send(data)
            if is_text and last.rstrip().rpartition(b"\n")[2] not in _DONE:
                await events.send(DONE)


def _join_documents(documents: Sequence[RawDocument]) -> HttpAnswer:
    """Join documents: several JSON documents into a list, others by concatenation."""
    if not documents:
        return HttpAnswer(204)
    types = list(dict.fromkeys(document.media_type for document in documents))
    if len(types) > 1:
        raise GraphFailure(
            f"the response has documents of several types: {', '.join(types)}; request a stream instead "
            '("stream": true)'
        )
    if len(documents) == 1 or types[0] != _JSON:
        data = b"".join(document.data for document in documents)
    else:
        data = b"[%b]" % b",".join(document.data for document in documents)
    return HttpAnswer(200, (("content-type", types[0]),), data)


def _line(document: RawDocument) -> bytes:
    return document.data.rstrip(b"\n") + b"\n"


def _event(document: RawDocument, *, has_name: bool) -> bytes:
    """Encode a document as an event, optionally named by its ``type``; binary data is an encoded event already."""
    if document.media_type != _JSON and not document.media_type.startswith("text/"):
        return document.data
    lines = document.data.splitlines() or [b""]
    name = _small_document(document.data).get("type") if has_name else None
    head = b"event: %b\n" % name.encode() if isinstance(name, str) and name.isprintable() else b""
    return head + b"".join(b"data: %b\n" % line for line in lines) + b"\n"
