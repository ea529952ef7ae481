"""What a handler's errors are to the client."""

from __future__ import annotations

import json
from typing import Final

from ovmstrio.core.errors import MalformedPayload, ServerError, UserCodeError
from ovmstrio.core.http import HttpAnswer
from ovmstrio.runtimes.handlers.http.responses import HTTPError

__all__ = ["error_answer", "plain_error", "text_answer", "wants_json"]

_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_JSON: Final = ("content-type", "application/json")
_NO_BODY: Final = frozenset({204, 304})


def text_answer(status: int, text: str) -> HttpAnswer:
    """Make an answer of a line of text."""
    return HttpAnswer(status, (_TEXT,), text.encode("utf-8", "replace"))


def wants_json(accept: str | None) -> bool:
    """Tell whether a client wants errors in JSON: it says that it takes JSON, and not that it takes text."""
    return accept is not None and _JSON[1] in accept and "text/" not in accept


def plain_error(status: int, text: str, *, as_json: bool) -> HttpAnswer:
    """Make the answer of an error that the server itself tells."""
    if as_json:
        return HttpAnswer(status, (_JSON,), json.dumps({"error": text}).encode())
    return text_answer(status, text)


def error_answer(
    error: ServerError | HTTPError, status: int, *, shows_details: bool = False, as_json: bool = False
) -> HttpAnswer:
    """Make the answer to a request that failed.

    Args:
        error: what the handler, or the server before it, raised.
        status: what the front end's table has for errors of the server; an ``HTTPError`` brings its own.
        shows_details: whether the client may see what the handler's code raised, and where.
        as_json: whether the client wants it in JSON; what the handler chose to say is sent as it says it.
    """
    if isinstance(error, HTTPError):
        return _chosen(error)
    if isinstance(error, MalformedPayload) and error.is_json:
        as_json = True
    text = error.message
    if isinstance(error, UserCodeError) and shows_details and error.detail:
        text = f"{text}: {error.detail}"
    return plain_error(status, text, as_json=as_json)


def _chosen(error: HTTPError) -> HttpAnswer:
    extra = tuple((name.lower(), value) for name, value in error.headers.items())
    # Statuses below 200 and these have no body, whatever the handler says.
    if error.status_code in _NO_BODY:
        return HttpAnswer(error.status_code, extra)
    kind = () if any(name == "content-type" for name, _ in extra) else (_TEXT,)
    return HttpAnswer(error.status_code, (*kind, *extra), error.detail.encode("utf-8", "replace"))
