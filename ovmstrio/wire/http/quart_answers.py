"""Answers as the framework wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Response

if TYPE_CHECKING:
    from ovmstrio.wire.http.answers import Answer

__all__ = ["to_quart"]


def to_quart(answer: Answer) -> Response:
    """Make the framework's response; one without a body has no type either."""
    response = Response(answer.body, answer.status, dict(answer.headers))
    if not answer.body:
        response.headers.pop("Content-Type", None)
    return response
