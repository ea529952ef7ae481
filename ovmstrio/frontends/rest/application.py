"""The REST application: every path but the short way of inferences, and the form of its errors.

Paths and statuses are those of ``ovms_classic`` sections 1.8, 1.10 and 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from quart import Blueprint, Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from ovmstrio import errors
from ovmstrio.frontends.rest import admin, kserve
from ovmstrio.frontends.rest.answers import Answer, error_answer, failure_answer
from ovmstrio.frontends.rest.infer_route import size_refusal
from ovmstrio.frontends.rest.quart_answers import to_quart

if TYPE_CHECKING:
    from ovmstrio.dataplane import DataPlane

__all__ = ["Cors", "make_application"]

log = structlog.get_logger(__name__)

INVALID_URL: Final = "Invalid request URL"
UNSUPPORTED_METHOD: Final = "Unsupported method"


@dataclass(frozen=True, slots=True)
class Cors:
    """What browsers of other origins may do."""

    origins: str
    methods: str = "*"
    headers: str = "*"
    credentials: bool = False

    def response_headers(self) -> dict[str, str]:
        """Give the headers that go with every answer."""
        headers = {
            "Access-Control-Allow-Origin": self.origins,
            "Access-Control-Allow-Methods": self.methods,
            "Access-Control-Allow-Headers": self.headers,
        }
        return headers | ({"Access-Control-Allow-Credentials": "true"} if self.credentials else {})


class _Application(QuartTrio):
    """Quart on trio, that loses no error."""

    async def handle_user_exception(self, error: Any) -> Any:
        """Find the handler of an error.

        Of a group, the framework answers for one and drops the others; all of it is logged first.
        """
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) > 1:
            log.error("request failed in several ways", path=request.path, exc_info=error)
        return await super().handle_user_exception(error)


def make_application(plane: DataPlane, *, max_body_bytes: int, cors: Cors | None = None) -> QuartTrio:
    """Make the application of one server."""
    app = _Application(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    for blueprint in (kserve.make_blueprint(plane, max_body_bytes), admin.make_blueprint(plane)):
        app.register_blueprint(blueprint)
    _handle_errors(app, max_body_bytes)
    if cors is not None:
        _allow_origins(app, cors)
    return app


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
        return size_refusal(request.content_length or "more", max_body_bytes)
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
        response.headers.update(cors.response_headers())
        return response

    app.after_request(add)
