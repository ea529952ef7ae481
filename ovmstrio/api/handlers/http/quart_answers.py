"""Answers of handlers as the framework wants them, and their end, however the framework comes to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio
from quart import Response, request

if TYPE_CHECKING:
    from ovmstrio.api.handlers.http.service import HandlerAnswer

__all__ = ["finish", "request_id_of", "respond", "sent_headers"]

_ANSWER: Final = "ovmstrio.handler_answer"
_BODILESS: Final = frozenset({204, 304})


def sent_headers() -> tuple[tuple[str, str], ...]:
    """Give the headers of the framework's request as they were sent."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.scope["headers"])


def respond(answer: HandlerAnswer) -> Response:
    """Make the framework's response; :func:`finish` must be called at the end of the request."""
    request.scope[_ANSWER] = answer  # type: ignore[typeddict-unknown-key]
    response = Response(answer.body, answer.status)
    response.timeout = None
    response.headers.clear()
    for name, value in answer.header_lines:
        response.headers.add(name, value)
    if isinstance(answer.body, bytes) and answer.status not in _BODILESS:
        response.headers["content-length"] = str(len(answer.body))
    return response


def request_id_of(scope: Any) -> str:
    """Give the id of a request that has been answered; nothing if it did not reach a handler."""
    answer: HandlerAnswer | None = scope.get(_ANSWER)
    return "" if answer is None else answer.request_id


async def finish(scope: Any) -> None:
    """End the answer of a request, which has been sent or cannot be: its stream is closed, its callbacks begin.

    Cancellation: shielded, as streams close in a bounded time.
    """
    answer: HandlerAnswer | None = scope.pop(_ANSWER, None)
    if answer is None:
        return
    if not isinstance(answer.body, bytes):
        with trio.CancelScope(shield=True):
            await answer.body.aclose()
    if answer.after is not None:
        answer.after()
