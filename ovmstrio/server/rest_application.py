"""The REST application: every path but the short way of inferences, and the form of its errors.

Paths and statuses are those of ``ovms_classic`` sections 1.8, 1.10, 2.2 and 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from quart import Blueprint, Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge, RequestTimeout

from ovmstrio.api.admin import routes as admin
from ovmstrio.api.handlers.http import mounts as handlers
from ovmstrio.api.handlers.http.quart_answers import finish
from ovmstrio.api.kserve.rest import generate
from ovmstrio.api.kserve.rest import kserve_routes as kserve
from ovmstrio.api.kserve.rest.infer_route import size_refusal
from ovmstrio.api.tensorflow.rest import routes as tensorflow
from ovmstrio.core import errors
from ovmstrio.wire.http.answers import Answer, error_answer, failure_answer
from ovmstrio.wire.http.quart_answers import to_quart
from ovmstrio.wire.http.targets import origin_form

if TYPE_CHECKING:
    from ovmstrio.api.handlers.http.mounts import HandlerMounts
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["Cors", "make_application"]

log = structlog.get_logger(__name__)

INVALID_URL: Final = "Invalid request URL"
UNSUPPORTED_METHOD: Final = "Unsupported method"

_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST"})


@dataclass(frozen=True, slots=True)
class Cors:
    """What browsers of other origins may do; ``origins`` are separated by commas, or ``*``."""

    origins: str
    methods: str = "*"
    headers: str = "*"
    credentials: bool = False

    def response_headers(self, origin: str) -> dict[str, str]:
        """Give the headers that go with an answer to a page of this origin, which may be empty.

        Browsers take one origin or ``*``, so of several the one that asks is named.
        """
        allowed = [each.strip() for each in self.origins.split(",")]
        headers = {} if self.origins == "*" else {"Vary": "Origin"}
        if self.origins != "*" and origin not in allowed:
            return headers
        headers |= {
            "Access-Control-Allow-Origin": "*" if self.origins == "*" else origin,
            "Access-Control-Allow-Methods": self.methods,
            "Access-Control-Allow-Headers": self.headers,
        }
        return headers | ({"Access-Control-Allow-Credentials": "true"} if self.credentials else {})


class _Application(QuartTrio):
    """Quart on trio, that loses no error and takes every target that a client may write."""

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; the framework would fail on a path that begins with no slash."""
        path = scope["path"] = origin_form(scope["path"])
        if not path.rstrip("/").endswith(generate.STREAM_SUFFIX):
            try:
                await super().asgi_app(scope, receive, send)
            finally:
                await finish(scope)
            return
        async with trio.open_nursery() as tasks:
            scope[generate.TASKS] = tasks
            await super().asgi_app(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def handle_user_exception(self, error: Any) -> Any:
        """Find the handler of an error.

        Of a group, the framework answers for one and drops the others; all of it is logged first.
        """
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) > 1:
            log.error("request failed in several ways", path=request.path, exc_info=error)
        return await super().handle_user_exception(error)


def make_application(
    plane: DataPlane, *, max_body_bytes: int, cors: Cors | None = None, mounts: HandlerMounts | None = None
) -> QuartTrio:
    """Make the application of one server."""
    app = _Application(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    if mounts is not None:
        # Before anything is judged by the rules of the server's own paths.
        app.register_blueprint(handlers.make_blueprint(mounts))
    for calls in (kserve, generate, tensorflow):
        app.register_blueprint(calls.make_blueprint(plane, max_body_bytes))
    app.register_blueprint(admin.make_blueprint(plane))
    app.before_request(_judge_target)
    _handle_errors(app, max_body_bytes)
    if cors is not None:
        _allow_origins(app, cors)
    return app


async def _judge_target() -> None:
    """Refuse verbs that nothing here knows, and targets that are no paths or try to be others."""
    if request.method not in _METHODS:
        raise errors.MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {request.method} {request.path}")
    # An encoded slash is part of a name, and no name has one; decoded it would part a path elsewhere.
    raw = request.scope["raw_path"].lower()
    if ".." in request.path or b"%2f" in raw or not raw.startswith((b"/", b"http://", b"https://")):
        raise errors.InvalidRequest(f"{INVALID_URL} - {request.method} {request.path}")


def _handle_errors(app: QuartTrio, max_body_bytes: int) -> None:
    async def domain(error: errors.ServerError) -> Response:
        return to_quart(error_answer(error))

    async def framework(error: HTTPException) -> Response:
        return to_quart(error_answer(_translate(error, max_body_bytes)))

    async def unforeseen(error: Exception) -> Response:
        log.error("request failed", path=request.path, exc_info=error)
        return to_quart(failure_answer())

    app.register_error_handler(errors.ServerError, domain)
    app.register_error_handler(HTTPException, framework)
    app.register_error_handler(Exception, unforeseen)


def _translate(error: HTTPException, max_body_bytes: int) -> errors.ServerError:
    if isinstance(error, MethodNotAllowed):
        return errors.MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {request.method} {request.path}")
    if isinstance(error, RequestEntityTooLarge):
        return size_refusal(request.content_length or f"more than {max_body_bytes}", max_body_bytes)
    if isinstance(error, RequestTimeout):
        return errors.InvalidRequest("the rest of the body did not come in time")
    return errors.InvalidRequest(f"{INVALID_URL} - {request.method} {request.path}")


def _allow_origins(app: QuartTrio, cors: Cors) -> None:
    preflight = Blueprint("cors", __name__)

    async def options(path: str = "") -> Response:
        del path
        return to_quart(Answer(200))

    preflight.add_url_rule("/", view_func=options, methods=["OPTIONS"])
    preflight.add_url_rule("/<path:path>", view_func=options, methods=["OPTIONS"])
    app.register_blueprint(preflight)

    async def add(response: Any) -> Any:
        response.headers.update(cors.response_headers(request.headers.get("Origin", "")))
        return response

    app.after_request(add)
