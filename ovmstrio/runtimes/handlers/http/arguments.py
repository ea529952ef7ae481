"""The arguments of a handler's method: only what it asks for is made."""

from __future__ import annotations

from typing import Any

from ovmstrio.core.http import HttpRequest
from ovmstrio.runtimes.handlers.http.payload import parse_payload
from ovmstrio.runtimes.handlers.http.values import QueryParams, RequestHeaders

__all__ = ["http_arguments"]


def http_arguments(wanted: frozenset[str], request: HttpRequest) -> dict[str, Any]:
    """Make the arguments that a method wants.

    Raises:
        MalformedPayload: it wants the payload, which is not what its content type says.
    """
    made: dict[str, Any] = {}
    if "payload" in wanted:
        made["payload"] = parse_payload(request.header("content-type"), request.body)
    if "headers" in wanted:
        made["headers"] = RequestHeaders(request.headers)
    if "query_params" in wanted:
        made["query_params"] = QueryParams(request.query)
    return made
