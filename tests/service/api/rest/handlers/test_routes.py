"""What is at which path and verb of a handler's server, the same by either lane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.service.api.rest.handlers.servers import serving_handler

ECHO = """
class Handler:
    def handle_post(self, payload, headers, query_params):
        return {"payload": payload, "header": headers.get("X-Who"), "query": dict(query_params)}

    def handle_get(self, query_params):
        return query_params.get("a", "nothing")

    def handle_delete(self):
        return None
"""
lanes = pytest.mark.parametrize("fast", [True, False], ids=["fast", "application"])


@lanes
async def test_a_handler_gets_what_it_asks_for(tmp_path: Path, fast: bool) -> None:
    """The parsed body, headers without case, and the query."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask("POST", "/?a=1&a=2&b=x%20y", json={"x": [1.5]}, headers={"x-who": "me"}, fast=fast)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == {"payload": {"x": [1.5]}, "header": "me", "query": {"a": "2", "b": "x y"}}
        answer = await served.ask("GET", "/?a=text", fast=fast)
        assert (answer.text, answer.headers["content-type"]) == ("text", "text/plain; charset=utf-8")
        answer = await served.ask("DELETE", fast=fast)
        assert (answer.status_code, answer.content) == (200, b"null")


@lanes
async def test_every_verb_reaches_its_method(tmp_path: Path, fast: bool) -> None:
    """With what that asks for, in any order; an argument that has a default keeps it."""
    asked = {
        "post": "payload, query_params, headers",
        "get": "headers, extra=5",
        "put": "query_params, payload",
        "patch": "*, headers, payload",
        "delete": "query_params",
    }
    lines = ["class Handler:"]
    for verb, names in asked.items():
        lines += [f"    def handle_{verb}(self, {names}):", f"        return '{verb}', sorted(locals())"]
    async with serving_handler(tmp_path, "\n".join(lines)) as served:
        for verb, names in asked.items():
            answer = await served.ask(verb.upper(), fast=fast)
            expected = sorted(["self", *(name.partition("=")[0] for name in names.split(", ") if name != "*")])
            assert answer.json() == [verb, expected]


@lanes
async def test_files_and_fields_of_a_form_reach_the_handler(tmp_path: Path, fast: bool) -> None:
    """As upload objects and texts; of several values of a field, all are there."""
    code = """
class Handler:
    def handle_post(self, payload):
        file = payload["file"]
        return [file.filename, file.content_type, file.file.read().decode(), payload.getlist("tag")]
"""
    async with serving_handler(tmp_path, code) as served:
        files = {"file": ("a.txt", b"hello", "text/plain")}
        answer = await served.ask(files=files, data={"tag": ["x", "y"]}, fast=fast)
    assert answer.json() == ["a.txt", "text/plain", "hello", ["x", "y"]]


@lanes
async def test_answers_and_errors_may_be_read_by_pages_of_any_origin(tmp_path: Path, fast: bool) -> None:
    """Without credentials, as browsers want it where any origin may."""
    async with serving_handler(tmp_path, ECHO) as served:
        answers = [
            await served.ask("GET", fast=fast, headers={"Origin": "http://else.where"}),
            await served.ask("PUT", fast=fast),
            await served.ask("POST", content=b"{", headers={"Content-Type": "application/json"}, fast=fast),
        ]
    assert [answer.status_code for answer in answers] == [200, 405, 400]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_does_not_reach_the_handler(tmp_path: Path) -> None:
    """It is answered with what pages may do, for a long time."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask("OPTIONS")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-methods"] == "POST, GET, PUT, PATCH, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "*"
    assert answer.headers["access-control-max-age"] == "1728000"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("verb", ["PUT", "PATCH", "HEAD", "TRACE"])
async def test_a_verb_without_a_method_is_not_allowed(tmp_path: Path, verb: str) -> None:
    """The answer says which verbs are."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask(verb)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "DELETE, GET, OPTIONS, POST"
    assert "content-type" not in answer.headers
    assert verb == "HEAD" or answer.text == "Method Not Allowed"


@pytest.mark.parametrize("path", ["/other", "/info//", "/info/more", "//", "/v3/models/a", "/models/a", "/..", "/%2f"])
async def test_other_paths_have_nothing(tmp_path: Path, path: str) -> None:
    """Whatever they look like."""
    async with serving_handler(tmp_path, ECHO) as served, served.connect() as peer:
        answer = await peer.ask(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (answer.status, answer.body) == (404, b"Not Found")


async def test_info_and_health_are_beside_the_handler(tmp_path: Path) -> None:
    """They have answers of their own, by GET only."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask("GET", "/info")
        assert (answer.status_code, answer.json(), answer.headers["content-type"]) == (200, {}, "application/json")
        assert (await served.ask("POST", "/info")).status_code == 405
        answer = await served.ask("GET", "/info/")
        assert (answer.status_code, answer.headers["location"]) == (307, "/info")
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await served.ask("GET", path)).status_code == 200


@lanes
@pytest.mark.parametrize(
    ("content", "kind", "status", "text"),
    [
        (b"{", "application/json", 400, None),
        (b"", "application/json", 400, None),
        (b'"\xff"', "application/json", 400, None),
        (b"\xff", "text/plain", 400, "the text is not in utf-8"),
        (b"a", "text/plain; charset=klingon", 400, "klingon"),
        (b"a", "multipart/form-data", 400, "boundary"),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_callers_fault(
    tmp_path: Path, fast: bool, content: bytes, kind: str, status: int, text: str | None
) -> None:
    """JSON that is none is told in JSON, all else in text."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask("POST", content=content, headers={"Content-Type": kind}, fast=fast)
    assert answer.status_code == status
    if text is None:
        assert list(json.loads(answer.content)) == ["error"]
    else:
        assert text in answer.text


async def test_a_body_that_nobody_asks_for_is_not_parsed(tmp_path: Path) -> None:
    """However wrong it is."""
    async with serving_handler(tmp_path, ECHO) as served:
        answer = await served.ask("DELETE", content=b"{", headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
