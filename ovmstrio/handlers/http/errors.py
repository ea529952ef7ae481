"""What a handler's errors are to the client."""

from __future__ import annotations

import json
from typing import Final

from ovmstrio.errors import MalformedPayload, ServerError, UserCodeError
from ovmstrio.handlers.http.answers import HttpAnswer
from ovmstrio.handlers.http.responses import HTTPError

__all__ = ["error_answer", "text_answer"]

_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_JSON: Final = ("content-type", "application/json")
_NO_BODY: Final = frozenset({204, 304})


def text_answer(status: int, text: str) -> HttpAnswer:
    """Make an answer of a line of text."""
    return HttpAnswer(status, (_TEXT,), text.encode("utf-8", "replace"))


def error_answer(error: ServerError | HTTPError, status: int, *, shows_details: bool = False) -> HttpAnswer:
    """Make the answer to a request that failed.

    Args:
        error: what the handler, or the server before it, raised.
        status: what the front end's table has for errors of the server; an ``HTTPError`` brings its own.
        shows_details: whether the client may see what the handler's code raised, and where.
    """
    if isinstance(error, HTTPError):
        return _chosen(error)
    if isinstance(error, MalformedPayload) and error.is_json:
        return HttpAnswer(status, (_JSON,), json.dumps({"error": error.message}).encode())
    if isinstance(error, UserCodeError) and shows_details and error.detail:
        return text_answer(status, f"{error.message}: {error.detail}")
    return text_answer(status, error.message)


def _chosen(error: HTTPError) -> HttpAnswer:
    extra = tuple((name.lower(), value) for name, value in error.headers.items())
    # Statuses below 200 and these have no body, whatever the handler says.
    if error.status_code in _NO_BODY:
        return HttpAnswer(error.status_code, extra)
    kind = () if any(name == "content-type" for name, _ in extra) else (_TEXT,)
    return HttpAnswer(error.status_code, (*kind, *extra), error.detail.encode("utf-8", "replace"))
