"""The arguments of a handler's method: only what it asks for is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ovmstrio.runtimes.handlers.http.payload import parse_payload
from ovmstrio.runtimes.handlers.http.values import QueryParams, RequestHeaders

__all__ = ["HttpRequest", "http_arguments"]


class HttpRequest:
    """A request as far as handlers can see it.

    Attributes:
        headers: names and values in their order.
        query: what follows the question mark, as it was sent.
        body: all of it; empty where the method does not want the payload, so that it need not be read.
    """

    __slots__ = ("body", "headers", "query")

    def __init__(self, headers: Iterable[tuple[str, str]], query: str = "", body: bytes = b"") -> None:
        self.headers = RequestHeaders(headers)
        self.query = query
        self.body = body


def http_arguments(wanted: frozenset[str], request: HttpRequest) -> dict[str, Any]:
    """Make the arguments that a method wants.

    Raises:
        MalformedPayload: it wants the payload, which is not what its content type says.
    """
    made: dict[str, Any] = {}
    if "payload" in wanted:
        made["payload"] = parse_payload(request.headers.get("content-type"), request.body)
    if "headers" in wanted:
        made["headers"] = request.headers
    if "query_params" in wanted:
        made["query_params"] = QueryParams(request.query)
    return made
