"""Triton's generate extension: ``/generate`` answers once, ``/generate_stream`` with server-sent events.

::

    request's own nursery
      ├─ framework: view ──> body of the answer <──┐ one event at a time
      └─ events task: DataPlane.open_stream ───────┘

The stream lives in a task of its own, so that no scope of it is open in the framework's.  An answer begins with the
first event; what fails before it has a status of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog
import trio
from quart import Blueprint, Response, request

from ovmstrio.api.bodies import read_body
from ovmstrio.api.doors import KSERVE_REST
from ovmstrio.api.kserve.rest.generate_answer import error_event, event, failure_event, generate_document
from ovmstrio.api.kserve.rest.generate_request import read_generate_request
from ovmstrio.api.kserve.rest.infer_route import check_version
from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError
from ovmstrio.core.request import StreamProblem
from ovmstrio.wire.http.answers import JSON, Answer
from ovmstrio.wire.http.quart_answers import to_quart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.core.request import InferRequest, InferResponse, StreamReply
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["STREAM_SUFFIX", "TASKS", "make_blueprint"]

log = structlog.get_logger(__name__)

STREAM_SUFFIX: Final = "/generate_stream"
TASKS: Final = "ovmstrio.tasks"
"""Where a request's scope holds the nursery whose end is the request's own."""

_EVENT_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def make_blueprint(plane: DataPlane, max_body_bytes: int) -> Blueprint:
    """Make the routes over one data plane."""
    routes = Blueprint("generate", __name__)

    async def generate(model: str, version: str = "") -> Response:
        asked = await _read(plane, model, check_version(version), max_body_bytes)
        return to_quart(await plane.infer(asked, KSERVE_REST, _render))

    async def generate_stream(model: str, version: str = "") -> Response:
        asked = await _read(plane, model, check_version(version), max_body_bytes, streamed=True)
        tasks: trio.Nursery = request.scope[TASKS]  # type: ignore[typeddict-item]
        events: trio.MemoryReceiveChannel[bytes] = await tasks.start(_run, plane, asked)
        response = Response(events, 200, _EVENT_HEADERS)
        # A stream takes as long as its graph does.
        response.timeout = None
        return response

    for suffix, view in (("/generate", generate), (STREAM_SUFFIX, generate_stream)):
        for path in _paths(suffix):
            routes.add_url_rule(path, view_func=view, methods=["POST"])
    return routes


def _paths(suffix: str) -> Iterable[str]:
    return f"/v2/models/<model>{suffix}", f"/v2/models/<model>/versions/<version>{suffix}"


async def _read(plane: DataPlane, model: str, version: str, limit: int, *, streamed: bool = False) -> InferRequest:
    described = await plane.describe(model, version, KSERVE_REST)
    if streamed and not described.has_streams:
        raise NotFound(f'"{model[:80]}" is a model, and only graphs have streams; POST to /generate for one answer')
    body = await read_body(plane, model, version, limit)
    try:
        asked = read_generate_request(model, version, body, described.inputs)
        if streamed and not asked.inputs:
            known = ", ".join(spec.name for spec in described.inputs)
            raise InvalidRequest(f"expected at least one input, got none; the inputs of {model[:80]} are: {known}")
    except ServerError as error:
        plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
        raise
    asked.received = len(body)
    return asked


def _render(response: InferResponse) -> tuple[Answer, int]:
    body = orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(200, body, {"Content-Type": JSON}), len(body)


async def _run(
    plane: DataPlane,
    asked: InferRequest,
    *,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Write the replies of one stream into a channel, which is reported with the first or at the end of none.

    Raises:
        ServerError: before the first reply.

    Ownership: the open stream.
    Cancellation: at any checkpoint; the stream is stopped.
    """
    send, receive = trio.open_memory_channel[bytes](0)
    begun = False
    async with send:
        try:
            async with plane.open_stream(asked, KSERVE_REST) as stream:
                stream.end()
                async for reply in stream:
                    data = _event(reply)
                    if not begun:
                        begun = True
                        task_status.started(receive)
                    await send.send(data)
                    stream.note_sent(len(data))
            if not begun:
                task_status.started(receive)
        except ServerError as error:
            if not begun:
                raise
            await send.send(error_event(error))
        except Exception:  # the border of one request, whose answer has begun
            if not begun:
                raise
            log.exception("stream failed", model=asked.model_name)
            await send.send(failure_event())


def _event(reply: StreamReply) -> bytes:
    """Write a reply; the stream has but one request, and what is wrong with that one is its end."""
    if isinstance(reply, StreamProblem):
        raise InvalidRequest(reply.message)
    return event(reply)
