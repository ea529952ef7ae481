"""HTTP paths of a pipeline.

::

    POST /{name}/{method}     pipeline request with any method name
    GET  /health              200 if ready, otherwise 503 with the reason
    GET  /metrics             metrics in Prometheus's text format
    GET  /trace               figures of Ops and channels for a live view

Below the pipeline's name on a shared server, ``/{method}`` is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import PayloadTooLarge, ServerError
from ovmstrio.core.events import set_failure
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.ops.http_json import encode_response, error_answer, http_status, parse_request_async, text_answer
from ovmstrio.ops.values import CustomExceptionCode, response_to_message
from ovmstrio.serving.interfaces import PADDLE_HTTP
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.telemetry.metrics import CONTENT_TYPE
from ovmstrio.transport.http import responses as answers
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.transport.http.router import Router, Rule, rule
from ovmstrio.transport.statuses import error_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.service import HttpRoutes
    from ovmstrio.ops.op_service import OpService
    from ovmstrio.ops.values import PipelineResponse
    from ovmstrio.serving.data_plane import DataPlane


def record_failure(response: PipelineResponse) -> None:
    """Record the failure of a response in the current call event."""
    if response.err_no and not response.is_overload:
        set_failure(response.err_msg, code=_code_of(response.err_no))


def _code_of(number: int) -> str:
    try:
        return CustomExceptionCode(number).name
    except ValueError:
        return CustomExceptionCode.PRODUCT_ERROR.name


_RESOURCE_EXHAUSTED: Final = 8


class OpsMountKind:
    """Mount kind of Op pipelines, with a limit for decompressed bodies."""

    door = PADDLE_HTTP

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Return the paths of a pipeline."""
        del name, is_root
        return _PipelineRoutes(service, self._plane, self._max_body_bytes)

    def refuse(self, error: Exception) -> HttpAnswer:
        """Return the gateway's response for an error."""
        if not isinstance(error, ServerError):
            return answers.error_response(error)
        if isinstance(error, PayloadTooLarge):
            return error_answer(error.message, 413, _RESOURCE_EXHAUSTED)
        status = error_status(error)
        return error_answer(error.message, status.http, status.grpc.value).with_headers(
            answers.retry_after_headers(error)
        )

    def is_call(self, method: str, path: str) -> bool:
        """Return whether the request is a pipeline call."""
        del path
        return method == "POST"

    def need(self, method: str, path: str) -> Permission:
        """Return the required scope: none for health, metrics for metrics."""
        if self.is_call(method, path):
            return Permission.INFER
        return {"health": Permission.NOTHING, "metrics": Permission.METRICS}.get(path.strip("/"), Permission.ABOUT)


class _PipelineRoutes:
    def __init__(self, service: OpService, plane: DataPlane, max_body_bytes: int) -> None:
        self._service = service
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        _, *parts = request.path.split("/")
        if request.method in {"GET", "HEAD"} and parts[1:] in ([], [""]) and parts:
            answer = self._operation(parts[0])
            if answer is not None:
                return answer
        target = _parse_path(parts, self._service.request_name if request.mount else None)
        if target is None:
            return None if request.mount else _path_error(request.method, parts)
        if request.method != "POST":
            return text_answer(405, "Method Not Allowed")
        return await self._infer(request, *target)

    async def _infer(self, request: HttpRequest, name: str, method: str) -> HttpAnswer:
        pipeline_request = await parse_request_async(
            await decompressed_body(request, self._max_body_bytes), name, method
        )
        pipeline_request.clientip = pipeline_request.clientip or request.client.host
        response = await self._service.answer(pipeline_request, math.inf)
        record_failure(response)
        message = response_to_message(response)
        by_code = http_status(message.err_no) if self._service.settings.http_status else 200
        return HttpAnswer(429 if response.is_overload else by_code, JSON_TYPE, encode_response(message))

    def _operation(self, name: str) -> HttpAnswer | None:
        if name == "health":
            return _health(self._plane)
        if name == "metrics":
            return _metrics(self._service.render_metrics)
        if name == "trace":
            snapshot = self._service.snapshot
            return text_answer(404, "Not Found") if snapshot is None else json_response(snapshot())
        return None


def _parse_path(parts: list[str], own: str | None) -> tuple[str, str] | None:
    """Return name and method of a path; below a mount the name is known.  A method may be empty after its slash."""
    is_ended = len(parts) > 1 and not parts[-1]
    if own is not None and len(parts) == 1 + is_ended:
        return own, parts[0]
    name, *methods = parts or [""]
    if not name or len(methods) not in {1, 1 + is_ended}:
        return None
    return name, methods[0]


def _path_error(method: str, parts: list[str]) -> HttpAnswer:
    if method == "POST" or len(parts) > 1 or not parts[0]:
        return text_answer(404, "Not Found")
    return text_answer(405, "Method Not Allowed")


def metrics_router(plane: DataPlane, metrics: Iterable[Rule], gate: Gate | None = None) -> Router:
    """Return the router of the metrics port: ``/metrics`` with authentication by the gate, and ``/health`` without."""

    async def health(_: HttpRequest) -> HttpAnswer:
        return _health(plane)

    rules = [rule("/health", "GET", health, need=Permission.NOTHING), *metrics]
    return Router(rules, _PathErrors(), gate=gate)


class _PathErrors:
    def no_path(self, method: str, path: str) -> HttpAnswer:
        del method, path
        return text_answer(404, "Not Found")

    def no_method(self, method: str, path: str) -> HttpAnswer:
        del method, path
        return text_answer(405, "Method Not Allowed")


def _health(plane: DataPlane) -> HttpAnswer:
    readiness = plane.readiness()
    document = {"status": "ok"} if readiness.ready else {"status": "not ready", "reason": readiness.reason}
    return json_response(document, 200 if readiness.ready else 503)


def _metrics(render: Callable[[], bytes | None] | None) -> HttpAnswer:
    text = None if render is None else render()
    if text is None:
        return text_answer(404, "Not Found")
    return HttpAnswer(200, (("content-type", CONTENT_TYPE),), text)
