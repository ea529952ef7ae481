"""Headers and query parameters, as handlers see them."""

from __future__ import annotations

from typing import cast

from ovmstrio.core.http import HttpRequest
from ovmstrio.runtimes.handlers.http.forms import http_arguments
from ovmstrio.runtimes.handlers.http.values import QueryParams, RequestHeaders


def test_headers_have_no_case() -> None:
    """The first of several values counts, and all are there."""
    headers = RequestHeaders([("X-Key", "1"), ("accept", "a"), ("x-key", "2")])
    assert (headers["X-KEY"], headers.get("Accept"), headers.get("other", "-")) == ("1", "a", "-")
    assert headers.getlist("X-key") == ["1", "2"]
    assert "ACCEPT" in headers
    assert cast("str", 7) not in headers
    assert dict(headers) == {"x-key": "1", "accept": "a"}
    assert len(headers) == 2
    assert headers.raw == [(b"x-key", b"1"), (b"accept", b"a"), (b"x-key", b"2")]
    assert "x-key" in repr(headers)


def test_the_last_of_a_parameters_values_counts() -> None:
    """As in a dictionary; all of them are there."""
    params = QueryParams("a=1&b=&a=%C3%BC+x&c")
    assert (params["a"], params.get("b"), params.get("z")) == ("ü x", "", None)
    assert params.getlist("a") == ["1", "ü x"]
    assert dict(params) == {"a": "ü x", "b": "", "c": ""}
    assert str(params) == "a=1&b=&a=%C3%BC+x&c="
    assert len(params) == 3


async def test_only_what_is_wanted_is_made() -> None:
    """A body that nobody wants may be anything."""
    request = HttpRequest("POST", "/", "v=2", (("content-type", "application/json"),), b"{")
    assert await http_arguments(frozenset(), request) == {}
    made = await http_arguments(frozenset({"query_params", "headers"}), request)
    assert made["query_params"]["v"] == "2"
    assert made["headers"]["content-type"] == "application/json"
    assert sorted(made) == ["headers", "query_params"]


async def test_the_payload_is_parsed_by_the_headers() -> None:
    """As its content type says."""
    request = HttpRequest("POST", "/", headers=(("content-type", "application/json"),), body=b"[1]")
    assert await http_arguments(frozenset({"payload"}), request) == {"payload": [1]}
