"""HTTP routes of a Nucleus handler class: argument binding, method call, response and errors."""

from __future__ import annotations

import json
import logging
import re
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self

import orjson
import structlog
import trio

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ServerError, UserCodeError, error_type
from ovmstrio.core.events import current_request_id as current_wire_id
from ovmstrio.core.events import set_failure
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.handlers.batches import current_request_id, log_request_ids, request_id_for
from ovmstrio.handlers.error_reporter import INTERNAL_ERROR
from ovmstrio.handlers.http_responses import HTTPError
from ovmstrio.handlers.http_values import error_response, server_error_response, text_response, wants_json
from ovmstrio.serving.interfaces import HANDLERS_HTTP
from ovmstrio.transport.http.responses import JSON_TYPE, retry_after_headers
from ovmstrio.transport.statuses import error_status
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.auth.revocable_streams import RevocableStream
    from ovmstrio.core.http_messages import ByteStream, Headers, HttpRequest
    from ovmstrio.core.service import HttpRoutes
    from ovmstrio.handlers.handler_class import HandlerMethod
    from ovmstrio.handlers.handler_loading import HttpHandler


class LeasedStream:
    """Response body that holds a resource until it is closed, and reports failures as broken connections.

    ``known`` is the request, cancelled when its credentials are revoked, and the function that unregisters it.
    """

    def __init__(
        self,
        body: ByteStream,
        release: Callable[[], None] | None = None,
        request_id: str = "",
        known: tuple[RevocableStream, Callable[[], None]] | None = None,
    ) -> None:
        self._body = body
        self._request_id = request_id
        self._release = release
        self._known = known

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece.

        Raises trio.BrokenResourceError if the handler failed, or the caller's credentials were revoked.
        """
        if self._known is None:
            return await self._next()
        request = self._known[0]
        if request.error is None:
            # Credentials can be revoked while the handler is waiting.
            with trio.CancelScope() as request.scope:
                return await self._next()
        raise trio.BrokenResourceError(f"response aborted: {request.error}")

    async def _next(self) -> bytes:
        try:
            with self._in_log():
                return await anext(self._body)
        except (ServerError, HTTPError) as error:
            # The status has been sent, so only an aborted response shows the failure.
            raise trio.BrokenResourceError(f"handler failed during its response: {text_of(error)}") from error

    async def aclose(self) -> None:
        """Close the body and release the resource."""
        release, self._release = self._release, None
        known, self._known = self._known, None
        if known is not None:
            known[1]()
        try:
            with self._in_log():
                await self._body.aclose()
        finally:
            if release is not None:
                release()

    def _in_log(self) -> AbstractContextManager[Any]:
        return log_request_ids(self._request_id) if self._request_id else nullcontext()


# Requests

_CORS: Final[Headers] = (
    ("access-control-allow-origin", "*"),
    ("access-control-allow-methods", "POST, GET, PUT, PATCH, DELETE, OPTIONS"),
    ("access-control-allow-headers", "*"),
    ("access-control-expose-headers", "Content-Length,Content-Range"),
)
_NAMES: Final = frozenset(name for name, _ in _CORS)

PREFLIGHT: Final[Headers] = (
    *_CORS,
    ("access-control-max-age", "1728000"),
    ("content-type", "text/plain; charset=utf-8"),
)
"""Headers of the response to ``OPTIONS``."""


def with_cors(headers: Headers) -> Headers:
    """Add the CORS headers that the handler did not set itself."""
    given = {name for name, _ in headers}
    if _NAMES.isdisjoint(given):
        return (*headers, *_CORS)
    return (*headers, *((name, value) for name, value in _CORS if name not in given))


def text_response_with_cors(status: int, text: str) -> HttpAnswer:
    """Create a plain-text response with CORS headers."""
    answer = text_response(status, text)
    return HttpAnswer(status, with_cors(answer.headers), answer.body)


def error_response_with_cors(error: Exception) -> HttpAnswer:
    """Create the response to an error; details of unexpected errors are hidden."""
    if not isinstance(error, ServerError):
        return text_response_with_cors(500, INTERNAL_ERROR)
    answer = error_response(error, error_status(error).http)
    return HttpAnswer(answer.status, with_cors((*answer.headers, *retry_after_headers(error))), answer.body)


_LOGGER: Final = logging.getLogger("uvicorn.access")
_TEXTS: Final = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}


def log_access(client: str, verb: str, target: str, status: int, request_id: str = "") -> None:
    """Log a completed request."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    code = _TEXTS.get(status, str(status))
    path = target.partition("?")[0]
    extra = {"method": verb, "path": path, "status_code": code}
    if request_id:
        extra["request_id"] = request_id
    _LOGGER.info('%s - "%s %s HTTP/1.1" %s', client or "-", verb, target, code, extra=extra)


log = structlog.get_logger(__name__)

_OPTIONS: Final = "OPTIONS"
_REQUEST_ID: Final = "x-request-id"
_FAILURES: Final = range(500, 600)
_HOP_BY_HOP: Final = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "date"})
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\u0100-\U0010ffff]*")
_STATUSES: Final = range(200, 1000)
_INFO: Final = "/info"


class HandlerRoutes:
    """Routes of one handler: its methods at ``/`` and the model metadata at ``/info``.

    With ``shows_details``, responses include type, message and line of user errors. ``info`` is blocking.
    """

    def __init__(
        self,
        handler: HttpHandler,
        *,
        info: Callable[[], Mapping[str, Any]] = dict,
        shows_details: bool = False,
        logs_access: bool = False,
    ) -> None:
        self._handler = handler
        self._info = info
        self._shows_details = shows_details
        self._logs_access = logs_access
        self._methods = {
            name.removeprefix("handle_").upper(): method
            for name, method in handler.methods.items()
            if name.startswith("handle_")
        }

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        """Answer a request, errors included; return None for an unknown path. The caller closes a streamed body."""
        if request.path in {"/", ""}:
            return await self._answer_method(request)
        answer = await self._answer_info(request)
        return None if answer is None else self._logged(request, answer)

    async def _answer_info(self, request: HttpRequest) -> HttpAnswer | None:
        if request.path.removesuffix("/") != _INFO:
            # At the root, no other service has paths.
            return None if request.mount else text_response_with_cors(404, "Not Found")
        if request.method not in {"GET", "HEAD"}:
            return text_response_with_cors(405, "Method Not Allowed")
        if request.path != _INFO:
            location = f"/{request.mount}{_INFO}" if request.mount else _INFO
            return HttpAnswer(307, with_cors((("location", location),)))
        # Reads files; does not occupy a thread of the handler.
        return HttpAnswer(200, JSON_TYPE, orjson.dumps(await trio.to_thread.run_sync(self._info)))

    async def _answer_method(self, request: HttpRequest) -> HttpAnswer:
        method = self._methods.get(request.method)
        if method is None:
            return self._logged(request, self._method_not_allowed(request.method))
        sent_id = request.header(_REQUEST_ID)
        known = current_wire_id.get()
        request_id = request_id_for(sent_id) if known is None else known.value
        with log_request_ids(request_id):
            response = await self._create_response(method, request)
        if (request_id == sent_id or response.status in _FAILURES) and _REQUEST_ID not in dict(response.headers):
            response = response.with_headers(((_REQUEST_ID, request_id),))
        return self._logged(request, response, request_id)

    def _error_response(self, error: ServerError | HTTPError, *, as_json: bool) -> HttpAnswer:
        if isinstance(error, HTTPError):
            return error_response(error, 0, as_json=as_json)
        status = error_status(error).http
        answer = error_response(error, status, shows_details=self._shows_details, as_json=as_json)
        return answer.with_headers(retry_after_headers(error))

    def _logged(self, request: HttpRequest, answer: HttpAnswer, request_id: str = "") -> HttpAnswer:
        if self._logs_access:
            log_access(request.client.host, request.method, request.target, answer.status, request_id)
        return answer

    async def _create_response(self, method: HandlerMethod, request: HttpRequest) -> HttpAnswer:
        answer = await self._call_handler(method, request)
        headers = with_cors(tuple(line for line in answer.headers if line[0] not in _HOP_BY_HOP))
        # Callbacks log with the id of this request.
        after = (partial(copy_context().run, self._handler.run_after, answer.after),) if answer.after else ()
        body, stream = answer.body, answer.stream
        if stream is not None:
            body = LeasedStream(stream, request_id=current_request_id())
        return HttpAnswer(answer.status, headers, body, after)

    def _method_not_allowed(self, verb: str) -> HttpAnswer:
        if verb == _OPTIONS:
            return HttpAnswer(204, PREFLIGHT)
        allowed = ", ".join(sorted({*self._methods, _OPTIONS}))
        return HttpAnswer(405, with_cors((("allow", allowed),)), b"Method Not Allowed")

    async def _call_handler(self, method: HandlerMethod, request: HttpRequest) -> HttpAnswer:
        as_json = wants_json(request.header("accept"))
        try:
            answer = await self._handler.answer(method.name, request)
        except (ServerError, HTTPError) as error:
            set_failure(getattr(error, "detail", "") or text_of(error), error_type=error_type(error))
            is_misread = isinstance(error, UserCodeError) and "payload" in method.arguments
            shown = HTTPError(415, _UNDECLARED_JSON) if is_misread and _is_undeclared_json(request) else error
            answer = self._error_response(shown, as_json=as_json)
        except Exception as error:  # the border of one request
            set_failure(text_of(error), error_type=error_type(error))
            log.exception("request failed", method=method.name)
            answer = server_error_response(500, INTERNAL_ERROR, as_json=as_json)
        response_error = _response_error(answer)
        if response_error is None:
            return answer
        log.error("invalid handler response", method=method.name, problem=response_error)
        if answer.stream is not None:
            await answer.stream.aclose()
        return server_error_response(500, INTERNAL_ERROR, as_json=as_json)


_UNDECLARED_JSON: Final = (
    "the request has no content type, so that the handler gets bytes; for JSON send content-type: application/json"
)
_MAX_EXAMINED_BYTES: Final = 2**16


def _is_undeclared_json(request: HttpRequest) -> bool:
    """Return whether a body is a JSON object or list without a content type, which Nucleus passes on as bytes."""
    body = request.body
    if request.header("content-type") or len(body) > _MAX_EXAMINED_BYTES or body.lstrip()[:1] not in {b"{", b"["}:
        return False
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _response_error(answer: HttpAnswer) -> str | None:
    if answer.status not in _STATUSES:
        return f"status {answer.status}: expected {_STATUSES.start} to {_STATUSES.stop - 1}"
    for name, value in answer.headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            return f"invalid header {name!r}: {value!r}"
    return None


class HandlerMountKind:
    """Routes of handlers among other services; see :class:`HandlerRoutes` for ``shows_details``."""

    api_interface = HANDLERS_HTTP

    def __init__(self, *, shows_details: bool = False) -> None:
        self._shows_details = shows_details

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Return the routes of a handler; requests are logged if it is the only service."""
        if service.grpc is not None:
            return _GrpcOnlyRoutes(name)
        return HandlerRoutes(
            service.handler,
            info=service.models.info,
            shows_details=self._shows_details,
            logs_access=is_root,
        )

    def refuse(self, error: Exception) -> HttpAnswer:
        """Create the response to an error as text with CORS headers."""
        return error_response_with_cors(error)

    def is_call(self, method: str, path: str) -> bool:
        """Return whether a request calls a method of the handler."""
        return path in {"", "/"} and method != _OPTIONS

    def need(self, method: str, path: str) -> Permission:
        """Return the required scope; preflight requests need none, since browsers send them without credentials."""
        if self.is_call(method, path):
            return Permission.INFER
        return Permission.NOTHING if method == _OPTIONS else Permission.ABOUT


class _GrpcOnlyRoutes:
    def __init__(self, name: str) -> None:
        self._name = name

    async def answer_http(self, request: HttpRequest) -> HttpAnswer:
        del request
        return text_response_with_cors(404, f"{self._name} is called over gRPC")
