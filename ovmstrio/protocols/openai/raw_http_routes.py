"""Paths below ``/v3`` that are no part of the API: those of services that take whole requests over HTTP.

::

    /v3/anything ─> service named by "model" of a JSON body, else by the path ─> documents ─> one answer, or events

The request asks for events by ``"stream": true`` of a JSON body, or by its header ``Accept``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from ovmstrio.auth.credential_headers import without_proof
from ovmstrio.core.errors import (
    GraphFailure,
    InvalidField,
    PayloadTooLarge,
    ServerError,
    ServiceMissing,
    VersionLoading,
)
from ovmstrio.core.http import HttpAnswer
from ovmstrio.encoding.json_reader import JsonLimitExceeded, JsonSyntaxError, parse_json, parse_strictly
from ovmstrio.protocols.openai.deltas import DONE
from ovmstrio.serving.interfaces import OPENAI_REST
from ovmstrio.serving.kind import Takes
from ovmstrio.serving.ovms_errors import inflated_body
from ovmstrio.transport.http.deadlines import deadline_of
from ovmstrio.transport.http.event_streams import answer_with_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.service import PayloadDocument, PayloadService
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.event_streams import EventSink

__all__ = ["answer_payload", "takes_payloads"]

_EVENTS: Final = "text/event-stream"
_JSON: Final = "application/json"
_TEXTS: Final = ("/chat/completions", "/completions")
_NAMED: Final = "/responses"
"""Whose events have names."""
_DONE: Final = frozenset({b"[DONE]", b"data: [DONE]", b"data:[DONE]"})
"""The last line of an answer that has its end already, as a document or as a written event."""
_CHANGED: Final = frozenset({"content-encoding", "content-length"})


async def answer_payload(api: OpenAIApi, request: HttpRequest, path: str) -> HttpAnswer | None:
    """Have the service answer that a request of a path below ``/v3`` is for; None if there is none.

    Args:
        api: has the services.
        request: one whose route has tasks.
        path: behind the prefix.

    Raises:
        PayloadTooLarge: the body, or the answer, is larger than it may be.
        ServerError: the service failed before its first event.

    Cancellation: anywhere; what makes the answer is stopped.
    """
    body = await inflated_body(request, api.max_body_bytes)
    document = await _read_document(body)
    name = _taker(api.plane, (document.get("model"), path, path.partition("/")[0]))
    if not name:
        return None
    headers = tuple(line for line in without_proof(request.headers) if line[0] not in _CHANGED)
    answering = _Answering(api, name, request._replace(body=body, headers=headers))
    try:
        if document.get("stream") is True or _EVENTS in (request.header("accept") or ""):
            return await answer_with_events(request, answering.stream, api.form.event)
        return await answering.answer_whole()
    except ServiceMissing:
        return None


async def _read_document(body: bytes) -> dict[str, Any]:
    """Return the members of a JSON object; none of any other body.

    Raises:
        InvalidField: the object exceeds a limit.

    Cancellation: between slices of a large body.
    """
    if body[:1] not in b"{ \t\r\n":
        return {}
    try:
        document = await parse_json(body, parse=parse_strictly)
    except JsonSyntaxError:
        return {}
    except JsonLimitExceeded as error:
        raise InvalidField(f"JSON body: {error}") from None
    return document if isinstance(document, dict) else {}


def _document_of(body: bytes) -> dict[str, Any]:
    """Give the members of a JSON object; none of any other body."""
    try:
        document = orjson.loads(body) if body[:1] in b"{ \t\r\n" else None
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _taker(plane: DataPlane, names: Sequence[Any]) -> str:
    """Give the first name of a service that takes payloads, or may do so once it is loaded; empty if none does."""
    for name in names:
        if not isinstance(name, str) or not name:
            continue
        try:
            takes, service = plane.registry.takes_of(name), plane.registry.peek(name)
        except VersionLoading:
            return name
        except ServerError:
            continue
        if Takes.PAYLOADS in takes and cast("PayloadService", service).takes_payloads:
            return name
    return ""


def takes_payloads(plane: DataPlane, name: str) -> bool:
    """Tell whether a service is loaded that takes requests over HTTP whole."""
    try:
        service = plane.registry.peek(name) if Takes.PAYLOADS in plane.registry.takes_of(name) else None
    except ServerError:
        return False
    return service is not None and cast("PayloadService", service).takes_payloads


class _Answering:
    """Has a service answer one request."""

    def __init__(self, api: OpenAIApi, name: str, request: HttpRequest) -> None:
        self._api = api
        self._name = name
        self._request = request

    async def _call(self, *, is_stream: bool) -> tuple[ObservedCall, PayloadService]:
        """Lease the service.

        Raises:
            ServiceMissing: it takes no such requests.
            ServerError: as ``DataPlane.call``.
        """
        request = self._request
        method = "Stream" if is_stream else "Unary"
        sent_id, size = request.header("x-request-id") or "", len(request.body)
        call = await self._api.plane.call(
            self._name, OPENAI_REST, method, request_id=sent_id, received=size, is_stream=is_stream
        )
        service = cast("PayloadService", call.service)
        if Takes.PAYLOADS in call.takes and service.takes_payloads:
            return call, service
        with call:
            raise ServiceMissing(f'"{self._name}" takes no requests over HTTP')

    async def answer_whole(self) -> HttpAnswer:
        """Answer with all that the service says."""
        deadline = deadline_of(self._request)
        call, service = await self._call(is_stream=False)
        with call:
            found: list[PayloadDocument] = []
            size = 0
            async with service.open_payload(self._request, deadline) as documents:
                while (document := await documents.receive()) is not None:
                    found.append(document)
                    size += len(document.data)
                    if size > self._api.max_body_bytes:
                        raise PayloadTooLarge.of_outputs(size, self._api.max_body_bytes)
            answer = _joined(found)
            call.event.sent = len(answer.content)
            return answer

    async def stream(self, events: EventSink) -> None:
        """Send an event for each document, and the end that clients wait for where they asked for a text."""
        deadline = deadline_of(self._request)
        has_names = self._request.path.endswith(_NAMED)
        is_text = self._request.path.endswith((*_TEXTS, _NAMED))
        call, service = await self._call(is_stream=True)
        with call:
            last = b""
            async with service.open_payload(self._request, deadline) as documents:
                while (document := await documents.receive()) is not None:
                    last = document.data
                    data = _event(document, has_name=has_names)
                    call.event.sent += len(data)
                    await events.send(data)
            if is_text and last.rstrip().rpartition(b"\n")[2] not in _DONE:
                await events.send(DONE)


def _joined(documents: Sequence[PayloadDocument]) -> HttpAnswer:
    """Make one answer: of several documents of JSON a list, of other pieces what they are together.

    Raises:
        GraphFailure: they are of several types.
    """
    if not documents:
        return HttpAnswer(204)
    types = list(dict.fromkeys(document.media_type for document in documents))
    if len(types) > 1:
        raise GraphFailure(
            f"the answer has documents of several types: {', '.join(types)}; they go to requests for a stream alone "
            '("stream": true)'
        )
    if len(documents) == 1 or types[0] != _JSON:
        data = b"".join(document.data for document in documents)
    else:
        data = b"[%b]" % b",".join(document.data for document in documents)
    return HttpAnswer(200, (("content-type", types[0]),), data)


def _event(document: PayloadDocument, *, has_name: bool) -> bytes:
    """Write a document as an event, maybe named as its type is; bytes are taken for events that have been written."""
    if document.media_type != _JSON and not document.media_type.startswith("text/"):
        return document.data
    lines = document.data.splitlines() or [b""]
    name = _document_of(document.data).get("type") if has_name else None
    head = b"event: %b\n" % name.encode() if isinstance(name, str) and name.isprintable() else b""
    return head + b"".join(b"data: %b\n" % line for line in lines) + b"\n"
