"""Triton's generate extension: ``/generate`` answers once, ``/generate_stream`` with server-sent events.

::

    request's own nursery
      ├─ framework: view ──> body of the answer <──┐ one event at a time
      └─ events task: DataPlane.open_stream ───────┘

The stream lives in a task of its own, so that no scope of it is open in the framework's.  An answer begins with the
first event; what fails before it has a status of its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
import structlog
import trio

from ovmstrio.api.doors import KSERVE_REST
from ovmstrio.api.kserve.rest.generate_request import read_generate_request
from ovmstrio.api.kserve.rest.infer_answer import check_version, json_values
from ovmstrio.api.kserve.rest.kserve_routes import model_paths
from ovmstrio.api.refusals import body_of_call
from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.request import StreamProblem
from ovmstrio.core.tensor import RawTensor
from ovmstrio.wire.http.answers import JSON_TYPE, error_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers, HttpRequest
    from ovmstrio.core.request import InferRequest, InferResponse, StreamReply
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["error_event", "event", "generate_document", "generate_rules"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that no text has; bytes that hold one are numbers."""


def generate_document(response: InferResponse) -> dict[str, Any]:
    """Give what a response says: each output under its name, as one value or a flat list of them.

    Raises:
        InvalidRequest: JSON cannot carry an output.
    """
    document: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    for tensor in response.outputs:
        document[tensor.name] = _value(tensor)
    return document


def event(response: InferResponse) -> bytes:
    """Write a response as an event.

    Raises:
        InvalidRequest: JSON cannot carry an output.
    """
    return b"data: %b\n\n" % orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)


def error_event(error: Exception) -> bytes:
    """Write an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_answer(error).content


def _value(tensor: Tensor | RawTensor) -> Any:
    if isinstance(tensor, RawTensor):
        text = _text(tensor)
        if text is not None:
            return text
    values = json_values(tensor)
    if len(values) != 1:
        return values
    return values[0].item() if isinstance(values, np.ndarray) else values[0]


def _text(tensor: RawTensor) -> str | None:
    """Read the bytes that Python nodes give for a text, which have the datatype ``UINT8`` unless they say another."""
    if tensor.datatype == "BYTES" and not len(tensor.data):
        return ""
    if tensor.datatype != "UINT8" or len(tensor.shape) != 1:
        return None
    try:
        text = bytes(tensor.data).decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


log = structlog.get_logger(__name__)

_EVENT_HEADERS: Final[Headers] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


def generate_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Make the rules over one data plane."""

    async def generate(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        asked = await _read(plane, request, model, check_version(version), max_body_bytes)
        return await plane.infer(asked, KSERVE_REST, _render)

    async def generate_stream(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        asked = await _read(plane, request, model, check_version(version), max_body_bytes, streamed=True)
        tasks: trio.Nursery = request.tasks
        return HttpAnswer(200, _EVENT_HEADERS, await tasks.start(_run, plane, asked))

    return [
        *(rule(path, "POST", generate) for path in model_paths("/generate")),
        *(rule(path, "POST", generate_stream, has_tasks=True) for path in model_paths("/generate_stream")),
    ]


async def _read(
    plane: DataPlane, request: HttpRequest, model: str, version: str, limit: int, *, streamed: bool = False
) -> InferRequest:
    described = await plane.describe(model, version, KSERVE_REST)
    if streamed and not described.has_streams:
        raise NotFound(f'"{model[:80]}" is a model, and only graphs have streams; POST to /generate for one answer')
    body = body_of_call(plane, request, model, version, limit=limit)
    try:
        asked = read_generate_request(model, version, body, described.inputs)
        if streamed and not asked.inputs:
            known = ", ".join(spec.name for spec in described.inputs)
            raise InvalidRequest(f"expected at least one input, got none; the inputs of {model[:80]} are: {known}")
    except ServerError as error:
        plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
        raise
    return asked


def _render(response: InferResponse) -> tuple[HttpAnswer, int]:
    body = orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpAnswer(200, JSON_TYPE, body), len(body)


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
            if not begun:
                task_status.started(receive)
        except ServerError as error:
            if not begun:
                raise
            await send.send(error_event(error))
        except Exception as error:  # the border of one request, whose answer has begun
            if not begun:
                raise
            log.exception("stream failed", model=asked.model_name)
            await send.send(error_event(error))


def _event(reply: StreamReply) -> bytes:
    """Write a reply; the stream has but one request, and what is wrong with that one is its end."""
    if isinstance(reply, StreamProblem):
        raise InvalidRequest(reply.message)
    return event(reply)
