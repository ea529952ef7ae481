"""Answers as values, and the one form that every error has on this port, whichever way the request came."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import Overloaded, ServerError
from ovmstrio.wire.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["JSON", "Answer", "error_answer", "failure_answer", "json_answer"]

JSON: Final = "application/json"

_MAX_TEXT: Final = 4096
"""Characters of an error that are told: it may quote what the caller sent."""


@dataclass(slots=True)
class Answer:
    """A whole answer: status, headers besides the length, and body; ``after`` is called when it has been sent."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], None] | None = None

    @property
    def header_lines(self) -> Iterable[tuple[str, str]]:
        """The headers one by one."""
        return self.headers.items()


def json_answer(value: Any, status: int = 200) -> Answer:
    """Answer with JSON."""
    try:
        body = orjson.dumps(value)
    except orjson.JSONEncodeError:
        # A text that is not UTF-8, such as a file name in a reason; the standard library escapes what is not.
        body = json.dumps(value).encode()
    return Answer(status, body, {"Content-Type": JSON})


def error_answer(error: ServerError) -> Answer:
    """Answer with an error: ``{"error": text}`` and the status of its class."""
    text = error.message
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    answer = json_answer({"error": text}, status_of(error).http)
    if isinstance(error, Overloaded):
        answer.headers = {**answer.headers, "Retry-After": str(max(1, round(error.retry_after_seconds)))}
    return answer


def failure_answer() -> Answer:
    """Answer for an error that nobody foresaw; what it was is in the log."""
    return json_answer({"error": "internal error; the server's log has the details"}, 500)
