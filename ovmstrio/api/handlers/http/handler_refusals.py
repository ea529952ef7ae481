"""Answers for requests that do not reach their handler, in the form that handlers' own errors have."""

from __future__ import annotations

from ovmstrio.api.handlers.http.handler_cors import with_cors
from ovmstrio.core.errors import ServerError
from ovmstrio.core.http import HttpAnswer
from ovmstrio.runtimes.handlers.handler_code import HIDDEN
from ovmstrio.runtimes.handlers.http.errors import error_answer, text_answer
from ovmstrio.wire.http.answers import retry_after
from ovmstrio.wire.statuses import status_of

__all__ = ["refuse", "text_to_send"]


def text_to_send(status: int, text: str) -> HttpAnswer:
    """Answer with a line of text."""
    answer = text_answer(status, text)
    return HttpAnswer(status, with_cors(answer.headers), answer.body)


def refuse(error: Exception) -> HttpAnswer:
    """Answer for an error; of one that nobody foresaw nothing is told."""
    if not isinstance(error, ServerError):
        return text_to_send(500, HIDDEN)
    answer = error_answer(error, status_of(error).http)
    return HttpAnswer(answer.status, with_cors((*answer.headers, *retry_after(error))), answer.body)
