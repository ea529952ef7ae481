"""The HTTP application of a pipeline: its own paths, and those of KServe v2 beside them.

::

    POST /{name}/{method}     a request of the pipeline; any method is accepted
    GET  /health              200 once every worker is there, else 503 with why
    GET  /metrics             Prometheus's text
    GET  /trace               the figures of Ops and channels, for a live view
    /v2/...                   KServe v2
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import structlog
from quart import Blueprint, Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from ovmstrio.api.kserve.rest import kserve_routes as kserve
from ovmstrio.api.kserve.rest.infer_route import inflate, size_refusal
from ovmstrio.api.paddle.http.reading import read_request
from ovmstrio.api.paddle.http.writing import error_answer, render, status_of_code, text_answer
from ovmstrio.core import errors
from ovmstrio.observability.metrics import CONTENT_TYPE
from ovmstrio.runtimes.ops.messages import to_message
from ovmstrio.wire.http import answers
from ovmstrio.wire.http.answers import JSON, Answer, failure_answer, json_answer
from ovmstrio.wire.http.quart_answers import to_quart

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.runtimes.ops.op_service import OpService

__all__ = ["make_application", "make_metrics_application"]

log = structlog.get_logger(__name__)

_KSERVE: Final = "/v2"
_RESOURCE_EXHAUSTED: Final = 8


def make_application(
    service: OpService,
    plane: DataPlane,
    *,
    max_body_bytes: int,
    render_metrics: Callable[[], bytes] | None = None,
    snapshot: Callable[[], dict[str, Any]] | None = None,
    http_status: bool = False,
) -> QuartTrio:
    """Make the application of one pipeline.

    Args:
        service: the pipeline.
        plane: serves it over KServe v2, and knows whether it is ready.
        max_body_bytes: larger bodies are refused.
        render_metrics: prints what scrapers get; None for nothing.
        snapshot: gives the figures for a live view; None for none.
        http_status: whether requests that failed have a status of their own, instead of 200.
    """
    app = _make_quart()
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes
    app.register_blueprint(kserve.make_blueprint(plane, max_body_bytes))
    app.register_blueprint(_pipeline(service, max_body_bytes, http_status=http_status))
    app.register_blueprint(_operation(plane, render_metrics, snapshot))
    _handle_errors(app, max_body_bytes)
    return app


def make_metrics_application(plane: DataPlane, render_metrics: Callable[[], bytes]) -> QuartTrio:
    """Make the application of a port for scrapers alone: ``/metrics`` and ``/health``."""
    app = _make_quart()
    app.register_blueprint(_operation(plane, render_metrics, None))
    _handle_errors(app, 0)
    return app


def _make_quart() -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    return app


def _pipeline(service: OpService, max_body_bytes: int, *, http_status: bool) -> Blueprint:
    routes = Blueprint("pipeline", __name__)

    @routes.post("/<name>/")
    @routes.post("/<name>/<method>")
    async def infer(name: str, method: str = "") -> Response:
        """Answer one request; cancelled when its client leaves.  The method may be empty, its slash must be there."""
        if not method and not request.path.endswith("/"):
            raise NotFound
        sent: Any = await request.get_data()
        body = inflate(sent, request.headers.get("Content-Encoding", "").strip().lower(), max_body_bytes)
        asked = read_request(body, name, method)
        asked.clientip = asked.clientip or request.remote_addr or ""
        response = await service.answer(asked, math.inf)
        message = to_message(response)
        status = 429 if response.is_overload else status_of_code(message.err_no) if http_status else 200
        return to_quart(Answer(status, render(message), {"Content-Type": JSON}))

    return routes


def _operation(
    plane: DataPlane, render_metrics: Callable[[], bytes] | None, snapshot: Callable[[], dict[str, Any]] | None
) -> Blueprint:
    routes = Blueprint("operation", __name__)

    @routes.get("/health")
    async def health() -> Response:
        readiness = plane.readiness()
        document = {"status": "ok"} if readiness.ready else {"status": "not ready", "reason": readiness.reason}
        return to_quart(json_answer(document, 200 if readiness.ready else 503))

    @routes.get("/metrics")
    async def metrics() -> Response:
        if render_metrics is None:
            return to_quart(text_answer(404, "Not Found"))
        return to_quart(Answer(200, render_metrics(), {"Content-Type": CONTENT_TYPE}))

    @routes.get("/trace")
    async def trace() -> Response:
        if snapshot is None:
            return to_quart(text_answer(404, "Not Found"))
        return to_quart(json_answer(snapshot()))

    return routes


def _handle_errors(app: QuartTrio, max_body_bytes: int) -> None:
    async def domain(error: errors.ServerError) -> Response:
        return to_quart(_refusal(error))

    async def framework(error: HTTPException) -> Response:
        if isinstance(error, RequestEntityTooLarge):
            return to_quart(_refusal(size_refusal(request.content_length or f"over {max_body_bytes}", max_body_bytes)))
        if isinstance(error, MethodNotAllowed):
            return to_quart(text_answer(405, "Method Not Allowed"))
        return to_quart(text_answer(404, "Not Found"))

    async def unforeseen(error: Exception) -> Response:
        log.error("request failed", path=request.path, exc_info=error)
        return to_quart(failure_answer())

    app.register_error_handler(errors.ServerError, domain)
    app.register_error_handler(HTTPException, framework)
    app.register_error_handler(Exception, unforeseen)


def _refusal(error: errors.ServerError) -> Answer:
    """Refuse in the form of the path's protocol."""
    if request.path.startswith(f"{_KSERVE}/"):
        return answers.error_answer(error)
    if isinstance(error, errors.PayloadTooLarge):
        return error_answer(error.message, 413, _RESOURCE_EXHAUSTED)
    return error_answer(error.message)
