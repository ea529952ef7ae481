"""One handler over HTTP: the request's arguments, the method of its verb, and the answer, whatever happens."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
import trio

from ovmstrio.api.handlers.http.cors import PREFLIGHT, with_cors
from ovmstrio.core.errors import Overloaded, ServerError, TooManyRequests
from ovmstrio.runtimes.handlers.handler_code import HIDDEN
from ovmstrio.runtimes.handlers.http.answers import HttpAnswer
from ovmstrio.runtimes.handlers.http.arguments import HttpRequest, http_arguments
from ovmstrio.runtimes.handlers.http.errors import error_answer, plain_error, text_answer, wants_json
from ovmstrio.runtimes.handlers.http.responses import HTTPError
from ovmstrio.runtimes.handlers.http.results import to_answer
from ovmstrio.runtimes.handlers.request_ids import current_request_id, in_log, request_id_for
from ovmstrio.wire.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.runtimes.handlers.handler import LoadedHandler
    from ovmstrio.runtimes.handlers.http.answers import ByteStream, Headers
    from ovmstrio.runtimes.handlers.methods import HandlerMethod

__all__ = ["HandlerAnswer", "HandlerService", "HeldStream", "refusal", "text_to_send"]

log = structlog.get_logger(__name__)

_OPTIONS: Final = "OPTIONS"
_REQUEST_ID: Final = "x-request-id"
_FAILURES: Final = range(500, 600)
_OF_THE_CONNECTION: Final = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "date"})
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\u0100-\U0010ffff]*")
_STATUSES: Final = range(200, 1000)


@dataclass(slots=True)
class HandlerAnswer:
    """An answer that can be sent: its headers are of HTTP, and say nothing of the length or of the connection.

    ``after`` must be called once the body has been sent, or could not be.  ``request_id`` is for the log.
    """

    status: int
    header_lines: Headers = ()
    body: bytes | ByteStream = b""
    after: Callable[[], None] | None = None
    request_id: str = ""


def text_to_send(status: int, text: str) -> HandlerAnswer:
    """Answer with a line of text."""
    return _sendable(text_answer(status, text))


class HandlerService:
    """Answers the requests to one handler.

    Args:
        handler: whose methods are called.
        limit: how many requests may be in flight.
        shows_details: whether clients may see what the handler's code raised.
    """

    def __init__(self, handler: LoadedHandler, limit: ConcurrencyLimit, *, shows_details: bool = False) -> None:
        self._handler = handler
        self._limit = limit
        self._shows_details = shows_details
        self._methods = {
            name.removeprefix("handle_").upper(): method
            for name, method in handler.methods.items()
            if name.startswith("handle_")
        }

    @property
    def verbs(self) -> frozenset[str]:
        """The verbs that the handler has methods for."""
        return frozenset(self._methods)

    def wants_payload(self, verb: str) -> bool:
        """Tell whether the body of a request has to be read."""
        method = self._methods.get(verb)
        return method is not None and method.wants_payload

    async def answer(self, verb: str, headers: Headers, query: str, body: bytes) -> HandlerAnswer:
        """Answer one request.

        Raises: nothing but cancellation; every failure becomes an answer.

        Ownership: a stream in the answer is the caller's to close; the request is in flight until then.

        Cancellation: as :meth:`LoadedHandler.call`.
        """
        method = self._methods.get(verb)
        if method is None:
            return self._without_method(verb)
        request = HttpRequest(headers, query, body)
        try:
            self._limit.take()
        except TooManyRequests as error:
            return refusal(error)
        sent_id = request.headers.get(_REQUEST_ID)
        request_id = request_id_for(sent_id)
        with in_log(request_id):
            made = await self._in_flight(method, request)
        made.request_id = request_id
        if (request_id == sent_id or made.status in _FAILURES) and _REQUEST_ID not in dict(made.header_lines):
            made.header_lines = (*made.header_lines, (_REQUEST_ID, request_id))
        return made

    async def _in_flight(self, method: HandlerMethod, request: HttpRequest) -> HandlerAnswer:
        is_streamed = False
        try:
            answer = await self._answered(method, request)
            is_streamed = not isinstance(answer.body, bytes)
        finally:
            if not is_streamed:
                self._limit.give_back()
        # What comes later is still of this request, for the log.
        after = partial(copy_context().run, self._handler.run_after, answer.after) if answer.after else None
        if isinstance(answer.body, bytes):
            return _sendable(answer, after)
        stream = HeldStream(answer.body, self._limit.give_back, current_request_id())
        return HandlerAnswer(answer.status, _lines(answer.headers), stream, after)

    def _without_method(self, verb: str) -> HandlerAnswer:
        if verb == _OPTIONS:
            return HandlerAnswer(204, PREFLIGHT)
        allowed = ", ".join(sorted({*self._methods, _OPTIONS}))
        return HandlerAnswer(405, with_cors((("allow", allowed),)), b"Method Not Allowed")

    async def _answered(self, method: HandlerMethod, request: HttpRequest) -> HttpAnswer:
        as_json = wants_json(request.headers.get("accept"))
        try:
            arguments = http_arguments(method.wanted, request)
            result = await self._handler.call(method.name, **arguments)
            answer = await to_answer(result, self._handler, method.name)
        except (ServerError, HTTPError) as error:
            status = status_of(error).http if isinstance(error, ServerError) else 0
            answer = error_answer(error, status, shows_details=self._shows_details, as_json=as_json)
        except Exception:  # the border of one request
            log.exception("request failed", method=method.name)
            answer = plain_error(500, HIDDEN, as_json=as_json)
        wrong = _fault(answer)
        if wrong is None:
            return answer
        log.error("a handler's answer cannot be sent", method=method.name, problem=wrong)
        if not isinstance(answer.body, bytes):
            await answer.body.aclose()
        return plain_error(500, HIDDEN, as_json=as_json)


class HeldStream:
    """A stream that holds something until it is closed, and whose failures are those of a connection.

    Args:
        body: the stream.
        give_back: what it holds.
        request_id: of the request that it answers, for the log.
    """

    def __init__(self, body: ByteStream, give_back: Callable[[], None], request_id: str = "") -> None:
        self._body = body
        self._request_id = request_id
        self._give_back: Callable[[], None] | None = give_back

    def __aiter__(self) -> Self:
        """Give itself."""
        return self

    async def __anext__(self) -> bytes:
        """Give the next piece.

        Raises:
            trio.BrokenResourceError: the handler failed.

        Cancellation: as the handler's stream.
        """
        try:
            with self._in_log():
                return await anext(self._body)
        except (ServerError, HTTPError) as error:
            # The status has been sent; all that can be said is that this is not the whole.
            raise trio.BrokenResourceError(f"the handler failed within its answer: {error}") from error

    async def aclose(self) -> None:
        """Stop the stream.

        Cancellation: as the handler's stream.
        """
        give_back, self._give_back = self._give_back, None
        try:
            with self._in_log():
                await self._body.aclose()
        finally:
            if give_back is not None:
                give_back()

    def _in_log(self) -> AbstractContextManager[Any]:
        return in_log(self._request_id) if self._request_id else nullcontext()


def _fault(answer: HttpAnswer) -> str | None:
    """Tell what of an answer is not HTTP, such as a line break in a header, which would begin another."""
    if answer.status not in _STATUSES:
        return f"the status is {answer.status}; expected one of {_STATUSES.start} to {_STATUSES.stop - 1}"
    for name, value in answer.headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            return f"the header {name!r} with the value {value!r} is not one of HTTP"
    return None


def _lines(headers: Headers) -> Headers:
    return with_cors(tuple(line for line in headers if line[0] not in _OF_THE_CONNECTION))


def _sendable(answer: HttpAnswer, after: Callable[[], None] | None = None) -> HandlerAnswer:
    body = answer.body if isinstance(answer.body, bytes) else b""
    return HandlerAnswer(answer.status, _lines(answer.headers), body, after)


def refusal(error: ServerError) -> HandlerAnswer:
    """Answer for a request that does not reach its handler."""
    answer = error_answer(error, status_of(error).http)
    if not isinstance(error, Overloaded):
        return _sendable(answer)
    wait = ("retry-after", str(max(1, round(error.retry_after_seconds))))
    return HandlerAnswer(answer.status, with_cors((*answer.headers, wait)), error.message.encode())
