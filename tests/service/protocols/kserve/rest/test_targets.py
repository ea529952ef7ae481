from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.protocols.mounts import SelfRoutedMount, ServiceMounts
from ovmstrio.protocols.ollama.routes import ollama_rules
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.http.router import Router
from tests.support.stub_registry import PassThrough, load_pass_through
from tests.unit.protocols.servers import BODY, Serving, infer_post, stack

HOST = b"Host: h\r\n"
SERVER = "OpenVINO Model Server"
INFER = b"POST /v2/models/echo/infer"
CHUNKED = b"Transfer-Encoding: chunked"


def _request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return line + b" HTTP/1.1\r\n" + HOST + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


URL, METHOD = "Invalid request URL", "Unsupported method"
BAD_LINES: dict[tuple[int, str], tuple[bytes, ...]] = {
    (400, f"{URL} - GET /index.html"): (b"GET /index.html",),
    (400, f"{URL} - GET /v4/models"): (b"GET /v4/models",),
    (400, f"{URL} - GET /nothing"): (b"GET http://[x/nothing",),
    (400, f"{URL} - POST /v1http://x/config/reload"): (b"POST /v1http://x/config/reload",),
    (400, f"{URL} - GET /http://h/v2"): (b"GET http://h/http://h/v2",),
    (400, f"{URL} - GET //h/v2"): (b"GET //h/v2",),
    (400, f"{URL} - GET /v2#x"): (b"GET /v2#x",),
    (400, URL): (
        *(b"GET /v2//models", b"GET ?x", b"GET *", b"GET v2", b"OPTIONS *"),
        *(b"POST /v1http:%2f%2fx/config/reload", b"GET /http://h/v2", b"GET /https://h/v2", b"GET http://h/v2http://h"),
        *(b"GET http:%2f%2fh/v2", b"GET http%3a//h/v2", b"GET http:///v2", b"GET http://?/v2", b"GET ftp://h/v2"),
        *(b"GET //metrics", b"POST /v1//config/reload", b"POST //v2/logging"),
        *(b"GET http://h/v2#x", b"GET h:80", b"GET /v2;x", b"GET /v2/./models"),
        *(b"GET /%2576%2532", b"GET /v2%2f", b"GET %2fv2", b"GET /v2%3fx", b"GET /v2%23", b"GET /v2/models/a/b"),
        *(b"GET /v2/models/..", b"GET /v2/models/%2e%2e/ready", b"GET /v2/models/../../v2"),
        *(b"GET /v2/models/a%2F%2e%2e/ready", b"GET /v2/models/a%2F../ready", b"POST /v2/models/a/b/infer"),
    ),
    (404, "Model with requested name is not found"): (
        *(b"GET /v2/models/%00%ff%c0%80", b"GET /v2/models/a..b", b"GET /v2/models/echo%2Fversions%2f1"),
    ),
    (406, f"{METHOD} - PUT /v2"): (b"PUT /v2",),
    (406, METHOD): (
        *(b"DELETE /v2/models/echo", b"PATCH /nothing", b"CONNECT h:80", b"TRACE *", b"POST /v2", b"OPTIONS /v2"),
        *(b"POST /v2/health/live", b"POST /metrics", b"GET /v2/models/echo/infer", b"GET /v1/config/reload"),
    ),
}


@pytest.mark.parametrize(
    ("line", "status", "text"), [(line, *error) for error, lines in BAD_LINES.items() for line in lines]
)
async def test_unknown_paths_and_verbs_are_refused(serving: Serving, line: bytes, status: int, text: str) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(_request(line, b"Content-Length: 0"))
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.json["error"].startswith(text)
        assert (await peer.ask(_request(b"GET /v2"))).json["name"] == SERVER


@pytest.mark.parametrize(
    "line",
    [
        *(b"GET /v2", b"GET /v2/", b"GET /v2?a=b&c", b"GET http://h/v2", b"GET HTTPS://h:1/v2?x", b"GET /%76%32"),
        *(b"GET //v2", b"GET /v2//", b"GET http://h//v2"),
    ],
)
async def test_a_path_has_several_forms(serving: Serving, line: bytes) -> None:
    async with serving.connect() as peer:
        assert (await peer.ask(_request(line))).json["name"] == SERVER


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /v2\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n" + HOST + b"Bad Name: x\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n" + HOST * 2 + b"\r\n", 400),
        (_request(b"GET /v2", b"X: " + b"a" * 70_000), 431),
        (_request(INFER, b"X: " + b"a" * 70_000), 431),
        (_request(b"POST /v2", b"Content-Length: five"), 400),
        (_request(b"POST /v2", b"Content-Length: -5"), 400),
        (_request(b"POST /v2", b"Content-Length: " + b"9" * 5_000), 400),
        (_request(b"POST /v2", b"Content-Length: 1", b"Content-Length: 2"), 400),
        (_request(INFER, b"Content-Length: 2", b"Content-Length: 3", body=b"{}}"), 400),
        (_request(b"POST /v2", b"Transfer-Encoding: sideways"), 400),
        (_request(INFER, CHUNKED, body=b"zz\r\n"), 400),
        (_request(INFER, CHUNKED, body=b"-5\r\n"), 400),
        (_request(INFER, CHUNKED, body=b"1\r\nabc\r\n"), 400),
    ],
)
async def test_malformed_http_is_refused_and_ends_the_connection(serving: Serving, data: bytes, status: int) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(data)
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.headers["connection"] == "close"
        assert await peer.rest() == b""


async def test_http_1_0_is_answered_and_closed(serving: Serving) -> None:
    async with serving.connect() as peer:
        assert (await peer.ask(b"GET /v2 HTTP/1.0\r\n\r\n")).json["name"] == SERVER
        assert await peer.rest() == b""


async def test_an_expected_continue_is_sent(serving: Serving) -> None:
    async with serving.connect() as peer:
        await peer.send(infer_post(BODY, "Expect: 100-continue")[: -len(BODY)])
        assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        assert (await peer.ask(BODY)).status == 200


@pytest.mark.parametrize(
    ("line", "length", "status"), [(INFER, 2**40, 413), (b"POST /nothing", 10, 400)], ids=["large body", "unknown path"]
)
async def test_a_request_that_is_refused_without_its_body_gets_no_continue(
    serving: Serving, line: bytes, length: int, status: int
) -> None:
    async with serving.connect() as peer:
        await peer.send(_request(line, b"Content-Length: %d" % length, b"Expect: 100-continue"))
        # Not ``ask``, which skips 100 Continue.
        received = await peer.rest()
        assert received.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nconnection: close\r\n" in received


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_chunked_bodies_are_read_for_every_chunk_size(serving: Serving, size: int) -> None:
    data = b",".join(b"%d" % (number % 10) for number in range(20_000 * min(size, 10)))
    count = data.count(b",") + 1
    body = b'{"inputs":[{"name":"x","shape":[%d],"datatype":"FP32","data":[%b]}]}' % (count, data)
    pieces = [body[start : start + size] for start in range(0, len(body), size)] if size > 7 else [body[:9], body[9:]]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    async with serving.connect() as peer:
        answer = await peer.ask(_request(INFER, CHUNKED, body=chunks))
    assert answer.status == 200
    assert answer.json["outputs"][0]["data"] == [number % 10 for number in range(count)]


_TOKENS = st.sampled_from(
    [b"GET ", b"POST ", b"/v2", b"/models/echo", b"/infer", b" HTTP/1.1\r\n", b"Host: h\r\n", b"\r\n", b"%2e", b"..",
     b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"3\r\n", b"{}\r\n", b"\0", b"\xff", b"?", b":", b"/"]
)  # fmt: skip


async def test_no_bytes_are_answered_with_a_server_error(serving: Serving) -> None:
    examples: list[bytes] = []

    @settings(max_examples=120, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(_TOKENS | st.binary(max_size=4), max_size=14).map(b"".join))
    def collect(data: bytes) -> None:
        examples.append(data)

    collect()
    for data in examples:
        async with serving.connect() as peer:
            await peer.send(data)
            await peer.stream.send_eof()  # type: ignore[attr-defined]
            assert re.findall(rb"HTTP/1\.1 5", await peer.rest()) == [], data
    assert (await serving.get("/v2")).status_code == 200


@pytest.mark.parametrize(("length", "body", "connection"), [(1000, b"the beginning", "close"), (3, b"all", None)])
async def test_an_early_refusal_ends_the_connection(
    serving: Serving, length: int, body: bytes, connection: str | None
) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"POST /nothing", b"Content-Length: %d" % length, body=body))
        assert (answer.status, answer.headers.get("connection")) == (400, connection)
        if connection is None:
            assert (await peer.ask(infer_post())).status == 200
        else:
            assert await peer.rest() == b""


class _Routed(PassThrough):
    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        if request.path == "/bad":
            raise InvalidRequest("malformed")
        if request.path == "/none":
            return None
        return HttpAnswer(200, (), json.dumps([request.mount, request.method, request.path]).encode())


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("/echo", 200, ["echo", "PUT", ""]),
        ("/echo/a%20b", 200, ["echo", "PUT", "/a b"]),
        ("/echo/bad", 400, {"error": "malformed"}),
        ("/echo/none", 200, ["", "PUT", "/echo/none"]),
        ("/else/where", 200, ["", "PUT", "/else/where"]),
        ("/none", 400, {"error": "Invalid request URL - PUT /none"}),
        ("/ec%68o/x", 200, ["echo", "PUT", "/x"]),
        ("/echo%2Fbad", 200, ["", "PUT", "/echo%2Fbad"]),
        ("/echo/%2fbad", 200, ["echo", "PUT", "/%2Fbad"]),
        ("/%2Fecho/bad", 200, ["", "PUT", "/%2Fecho/bad"]),
        ("http://h/echo/x", 200, ["echo", "PUT", "/x"]),
        ("/elsehttp://h/where", 200, ["", "PUT", "/elsehttp://h/where"]),
        ("/echohttp://h/bad", 200, ["", "PUT", "/echohttp://h/bad"]),
    ],
)
async def test_paths_below_a_name_are_those_of_its_service(tmp_path: Path, target: str, status: int, body: Any) -> None:
    async def load(spec: ModelSpec, version: int, directory: Path) -> PassThrough:
        loaded = await load_pass_through(spec, version, directory)
        loaded.__class__ = _Routed
        return loaded

    async with stack(tmp_path, loader=load) as (plane, _, _):
        mounts = ServiceMounts(plane, {ModelSpec.kind: SelfRoutedMount}, root="echo")
        router = Router([], OvmsRouteErrors(), mounts.find)
        route = router.find("PUT", target)
        assert not isinstance(route, HttpAnswer)
        answer = await router.answer(route, HttpRequest("PUT", route.path, mount=route.mount))
    assert (answer.status, json.loads(answer.content)) == (status, body)


@pytest.mark.parametrize(("name", "expected"), [("api", ["api", "POST", "/version"]), ("other", None)])
async def test_a_service_keeps_paths_that_ollamas_api_has_too(
    tmp_path: Path, name: str, expected: list[str] | None
) -> None:
    async def load(spec: ModelSpec, version: int, directory: Path) -> PassThrough:
        loaded = await load_pass_through(spec, version, directory)
        loaded.__class__ = _Routed
        return loaded

    (tmp_path / name / "1").mkdir(parents=True)
    spec = ModelSpec.model_validate({"name": name, "base_path": tmp_path / name})
    async with stack(tmp_path, loader=load, models=(spec,)) as (plane, _, _):
        mounts = ServiceMounts(plane, {ModelSpec.kind: SelfRoutedMount})
        router = Router(ollama_rules(plane, 1000), OvmsRouteErrors(), mounts.find)
        method = "POST" if expected else "GET"
        route = router.find(method, "/api/version")
        assert not isinstance(route, HttpAnswer)
        answer = await router.answer(route, HttpRequest(method, route.path, mount=route.mount))
    document = json.loads(answer.content)
    assert document == expected if expected else "version" in document
