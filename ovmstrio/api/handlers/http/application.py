"""The application of a project alone: every request that the fast lane does not take."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import structlog
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ovmstrio.api.handlers.http.access_log import log_access
from ovmstrio.api.handlers.http.info import info_answer
from ovmstrio.api.handlers.http.quart_answers import finish, request_id_of, respond, sent_headers
from ovmstrio.api.handlers.http.service import HandlerAnswer, text_to_send
from ovmstrio.runtimes.handlers.handler_code import HIDDEN
from ovmstrio.wire.http.targets import origin_form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.api.handlers.http.service import HandlerService

__all__ = ["make_project_application"]

log = structlog.get_logger(__name__)

_EVERY_VERB: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
_INFO: Final = "/info"
_LIVE: Final = "/v2/health/live"
_READY: Final = "/v2/health/ready"


class _Application(QuartTrio):
    """Quart on trio, that ends every answer."""

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; the framework would fail on a path that begins with no slash."""
        scope["path"] = origin_form(scope["path"])
        try:
            await super().asgi_app(scope, receive, send)
        finally:
            await finish(scope)


def make_project_application(
    service: HandlerService, info: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool]
) -> QuartTrio:
    """Make the application: the handler at ``/``, ``/info``, and the server's health.

    Args:
        service: the handler.
        info: what ``/info`` tells of its models.
        is_ready: what ``/v2/health/ready`` tells.
    """
    app = _Application(__name__, static_folder=None)
    app.config |= {"MAX_CONTENT_LENGTH": None, "BODY_TIMEOUT": None, "RESPONSE_TIMEOUT": None}
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False

    async def handler() -> Response:
        # The framework takes "//" for it, too.
        if request.scope["path"] != "/":
            return respond(text_to_send(404, "Not Found"))
        verb = request.method
        body: Any = await request.get_data() if service.wants_payload(verb) else b""
        query = request.query_string.decode("latin-1")
        return respond(await service.answer(verb, sent_headers(), query, body))

    async def models() -> Response:
        return respond(await info_answer(info))

    async def models_without_slash() -> Response:
        return respond(HandlerAnswer(307, (("location", _INFO),)))

    async def live() -> Response:
        return respond(HandlerAnswer(200))

    async def ready() -> Response:
        return respond(HandlerAnswer(200 if is_ready() else 503))

    app.add_url_rule("/", view_func=handler, methods=_EVERY_VERB)
    for path, view in ((_INFO, models), (f"{_INFO}/", models_without_slash), (_LIVE, live), (_READY, ready)):
        app.add_url_rule(path, view_func=view, methods=["GET"])
    app.register_error_handler(HTTPException, _framework)
    app.register_error_handler(Exception, _unforeseen)
    app.after_request(_log)
    return app


async def _framework(error: HTTPException) -> Response:
    status = error.code or HTTPStatus.INTERNAL_SERVER_ERROR.value
    return respond(text_to_send(status, HTTPStatus(status).phrase))


async def _unforeseen(error: Exception) -> Response:
    log.error("request failed", path=request.path, exc_info=error)
    return respond(text_to_send(500, HIDDEN))


async def _log(response: Any) -> Any:
    if request.path not in {_LIVE, _READY}:
        query = request.query_string.decode("latin-1")
        target = f"{request.path}?{query}" if query else request.path
        log_access(
            request.remote_addr or "", request.method, target, response.status_code, request_id_of(request.scope)
        )
    return response
