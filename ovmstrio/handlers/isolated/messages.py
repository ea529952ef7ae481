"""Requests and responses of isolated handlers as plain data for the channel to the worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.handlers.http_responses import HTTPError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.http_messages import Headers

ANSWER: Final = "answer"
_HTTP_ERROR: Final = "chosen"
_MALFORMED: Final = "malformed"


def encode_refusal(error: MalformedPayload | HTTPError) -> list[Any]:
    """Encode an error whose status and text are meant for the client."""
    if isinstance(error, HTTPError):
        return [_HTTP_ERROR, error.status_code, error.detail, error.headers]
    return [_MALFORMED, error.message, error.is_json]


def decode_refusal(row: list[Any]) -> MalformedPayload | HTTPError | None:
    """Decode an error encoded by :func:`encode_refusal`; None if the row is another kind."""
    kind, *rest = row
    if kind == _HTTP_ERROR:
        return HTTPError(*rest)
    return MalformedPayload(rest[0], is_json=rest[1]) if kind == _MALFORMED else None


class MethodRow(NamedTuple):
    """Description of a handler's method for the server."""

    name: str
    arguments: list[str]
    is_generator: bool
    is_batched: bool
    is_async: bool


class ResponseHead(NamedTuple):
    """Response without its body; ``after`` is the number of its callbacks, 0 for none."""

    status: int
    headers: list[list[str]]
    after: int

    def answer(self, body: Any, run_after: Callable[[int], None]) -> HttpAnswer:
        """Create the response; ``run_after`` is called with the number of the callbacks."""
        headers: Headers = tuple((name, value) for name, value in self.headers)
        number = self.after
        return HttpAnswer(self.status, headers, body, (lambda: run_after(number),) if number else ())


def encode_head(answer: HttpAnswer, after: int) -> list[Any]:
    """Encode a response without its body."""
    return [answer.status, [list(pair) for pair in answer.headers], after]


def encode_request(request: HttpRequest) -> list[Any]:
    """Encode a request."""
    return [request.method, request.path, request.query, [list(pair) for pair in request.headers], request.body]


def decode_request(row: list[Any]) -> HttpRequest:
    """Decode a request."""
    method, path, query, headers, body = row
    return HttpRequest(method, path, query, tuple((name, value) for name, value in headers), body)
