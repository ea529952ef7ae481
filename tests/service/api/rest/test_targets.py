"""Odd targets, verbs, heads and wishes for other protocols: refused as the caller's mistake, harmful to nobody."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.api.rest.servers import BODY, Serving, infer_post

HOST = b"Host: h\r\n"
SERVER = "OpenVINO Model Server"


def _request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return line + b" HTTP/1.1\r\n" + HOST + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        (b"GET /index.html", 400, "Invalid request URL - GET /index.html"),
        (b"GET /v4/models", 400, "Invalid request URL - GET /v4/models"),
        (b"GET /v2//models", 400, "Invalid request URL"),
        (b"POST /v2/models//echo/infer", 400, "Invalid request URL"),
        (b"GET ?x", 400, "Invalid request URL"),
        (b"GET *", 400, "Invalid request URL"),
        (b"GET v2", 400, "Invalid request URL"),
        (b"GET http://[x/nothing", 400, "Invalid request URL - GET /nothing"),
        (b"POST /v1http://x/config/reload", 400, "Invalid request URL - POST /v1http://x/config/reload"),
        (b"POST /v1http:%2f%2fx/config/reload", 400, "Invalid request URL"),
        (b"GET /http://h/v2", 400, "Invalid request URL"),
        (b"GET /https://h/v2", 400, "Invalid request URL"),
        (b"GET http://h/http://h/v2", 400, "Invalid request URL - GET /http://h/v2"),
        (b"GET http://h/v2http://h", 400, "Invalid request URL"),
        (b"GET http:%2f%2fh/v2", 400, "Invalid request URL"),
        (b"GET http%3a//h/v2", 400, "Invalid request URL"),
        (b"GET http:///v2", 400, "Invalid request URL"),
        (b"GET http://?/v2", 400, "Invalid request URL"),
        (b"GET ftp://h/v2", 400, "Invalid request URL"),
        (b"GET //h/v2", 400, "Invalid request URL - GET //h/v2"),
        (b"GET http://h//v2", 400, "Invalid request URL"),
        (b"GET /v2#x", 400, "Invalid request URL - GET /v2#x"),
        (b"GET http://h/v2#x", 400, "Invalid request URL"),
        (b"GET h:80", 400, "Invalid request URL"),
        (b"GET /v2;x", 400, "Invalid request URL"),
        (b"GET /v2/./models", 400, "Invalid request URL"),
        (b"GET /%2576%2532", 400, "Invalid request URL"),
        (b"GET /v2%2f", 400, "Invalid request URL"),
        (b"GET %2fv2", 400, "Invalid request URL"),
        (b"GET /v2%3fx", 400, "Invalid request URL"),
        (b"GET /v2%23", 400, "Invalid request URL"),
        (b"GET /v2/models/a/b", 400, "Invalid request URL"),
        (b"GET /v2/models/..", 400, "Invalid request URL"),
        (b"GET /v2/models/%2e%2e/ready", 400, "Invalid request URL"),
        (b"GET /v2/models/../../v2", 400, "Invalid request URL"),
        (b"POST /v2/models/a..b/infer", 400, "Invalid request URL"),
        (b"GET /v2/models/echo%2Fversions%2f1", 400, "Invalid request URL"),
        (b"POST /v2/models/a%2fb/infer", 400, "Invalid request URL"),
        (b"GET /v2/models/%00%ff%c0%80", 404, "Model with requested name is not found"),
        (b"PUT /v2", 406, "Unsupported method - PUT /v2"),
        (b"DELETE /v2/models/echo", 406, "Unsupported method"),
        (b"PATCH /nothing", 406, "Unsupported method"),
        (b"CONNECT h:80", 406, "Unsupported method"),
        (b"TRACE *", 406, "Unsupported method"),
        (b"POST /v2", 406, "Unsupported method"),
        (b"POST /v2/health/live", 406, "Unsupported method"),
        (b"POST /metrics", 406, "Unsupported method"),
        (b"GET /v2/models/echo/infer", 406, "Unsupported method"),
        (b"GET /v1/config/reload", 406, "Unsupported method"),
        (b"OPTIONS /v2", 406, "Unsupported method"),
        (b"OPTIONS *", 400, "Invalid request URL"),
    ],
)
async def test_what_is_no_path_or_verb_is_refused(serving: Serving, line: bytes, status: int, text: str) -> None:
    """Each has its status, the one form of errors, and leaves the connection usable."""
    async with serving.connect() as peer:
        answer = await peer.ask(_request(line, b"Content-Length: 0"))
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.json["error"].startswith(text)
        assert (await peer.ask(_request(b"GET /v2"))).json["name"] == SERVER


@pytest.mark.parametrize(
    "line", [b"GET /v2", b"GET /v2/", b"GET /v2?a=b&c", b"GET http://h/v2", b"GET HTTPS://h:1/v2?x", b"GET /%76%32"]
)
async def test_one_path_has_many_forms(serving: Serving, line: bytes) -> None:
    """Absolute targets, queries, final slashes and percent-encoding name the same resource."""
    async with serving.connect() as peer:
        assert (await peer.ask(_request(line))).json["name"] == SERVER


@pytest.mark.parametrize("host", [b"", b"[::", b"a b:zz", b"\xe9", b"h:99999", b",", b"a/../b"])
async def test_the_host_does_not_matter(serving: Serving, host: bytes) -> None:
    """One server answers for every name that it is called by, odd ones included."""
    async with serving.connect() as peer:
        assert (await peer.ask(b"GET /v2 HTTP/1.1\r\nHost: %b\r\n\r\n" % host)).status in {200, 400}
    assert (await serving.get("/v2")).status_code == 200


async def test_head_is_get_without_a_body(serving: Serving) -> None:
    """Load balancers probe with it."""
    async with serving.connect() as peer:
        await peer.send(_request(b"HEAD /v2"))
        answer = await peer.answer(has_body=False)
        assert answer.status == 200
        assert int(answer.headers["content-length"]) > 0
        assert (await peer.ask(_request(b"GET /v2"))).status == 200


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
        (_request(b"POST /v2/models/echo/infer", b"X: " + b"a" * 70_000), 431),
        (_request(b"POST /v2", b"Content-Length: five"), 400),
        (_request(b"POST /v2", b"Content-Length: -5"), 400),
        (_request(b"POST /v2", b"Content-Length: " + b"9" * 5_000), 400),
        (_request(b"POST /v2", b"Content-Length: 1", b"Content-Length: 2"), 400),
        (_request(b"POST /v2/models/echo/infer", b"Content-Length: 2", b"Content-Length: 3", body=b"{}}"), 400),
        (_request(b"POST /v2", b"Transfer-Encoding: sideways"), 400),
        (_request(b"POST /v2/models/echo/infer", b"Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
        (_request(b"POST /v2/models/echo/infer", b"Transfer-Encoding: chunked", body=b"-5\r\n"), 400),
        (_request(b"POST /v2/models/echo/infer", b"Transfer-Encoding: chunked", body=b"1\r\nabc\r\n"), 400),
    ],
)
async def test_what_is_not_http_is_refused_and_the_connection_closed(
    serving: Serving, data: bytes, status: int
) -> None:
    """The refusal has the form of every other error and is never the server's fault."""
    async with serving.connect() as peer:
        answer = await peer.ask(data)
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.headers["connection"] == "close"
        assert await peer.rest() == b""


async def test_two_lengths_do_not_smuggle_a_request(serving: Serving) -> None:
    """A body whose end is in doubt is refused, and what follows it is not read."""
    both = (b"Content-Length: 5", b"Transfer-Encoding: chunked")
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"POST /v2/models/echo/infer", *both, body=b"0\r\n\r\n" + infer_post()))
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        await peer.stream.send_eof()  # type: ignore[attr-defined]
        assert await peer.rest() == b""
    assert serving.servable.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: eA=="),
        (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    ],
    ids=["websocket", "h2c"],
)
async def test_a_wish_for_another_protocol_is_not_heard(serving: Serving, headers: tuple[bytes, ...]) -> None:
    """The request is answered in HTTP/1.1, and what follows must be HTTP/1.1, too."""
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"GET /v2", *headers))
        assert (answer.status, answer.json["name"]) == (200, SERVER)
        assert "upgrade" not in answer.headers
        assert (await peer.ask(_request(b"GET /v2"))).status == 200
        assert (await peer.ask(b"\x81\x85late\r\n\r\n")).status == 400
        assert await peer.rest() == b""


@pytest.mark.parametrize("extra", [(), ("TE: trailers",)], ids=["lane", "application"])
async def test_a_connection_closes_when_the_client_wishes(serving: Serving, extra: tuple[str, ...]) -> None:
    """The answer says so, and the connection ends after it."""
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(BODY, "Connection: close", *extra))
        assert (answer.status, answer.headers["connection"].lower()) == (200, "close")
        assert await peer.rest() == b""


async def test_http_1_0_is_answered_and_closed(serving: Serving) -> None:
    """Old clients wait for the end of the connection."""
    async with serving.connect() as peer:
        assert (await peer.ask(b"GET /v2 HTTP/1.0\r\n\r\n")).json["name"] == SERVER
        assert await peer.rest() == b""


async def test_a_body_that_is_waited_for_is_asked_for(serving: Serving) -> None:
    """``Expect: 100-continue`` is met."""
    async with serving.connect() as peer:
        await peer.send(infer_post(BODY, "Expect: 100-continue")[: -len(BODY)])
        assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        assert (await peer.ask(BODY)).status == 200


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_chunked_bodies_are_read_however_they_are_cut(serving: Serving, size: int) -> None:
    """A large body that arrives while the connection leaves the lane loses no byte."""
    data = b",".join(b"%d" % (number % 10) for number in range(20_000 * min(size, 10)))
    count = data.count(b",") + 1
    body = b'{"inputs":[{"name":"x","shape":[%d],"datatype":"FP32","data":[%b]}]}' % (count, data)
    cut = [body[start : start + size] for start in range(0, len(body), size)] if size > 7 else [body[:9], body[9:]]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut) + b"0\r\n\r\n"
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"POST /v2/models/echo/infer", b"Transfer-Encoding: chunked", body=chunks))
    assert answer.status == 200
    assert answer.json["outputs"][0]["data"] == [number % 10 for number in range(count)]


_TOKENS = st.sampled_from(
    [b"GET ", b"POST ", b"/v2", b"/models/echo", b"/infer", b" HTTP/1.1\r\n", b"Host: h\r\n", b"\r\n", b"%2e", b"..",
     b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"3\r\n", b"{}\r\n", b"\0", b"\xff", b"?", b":", b"/"]
)  # fmt: skip


async def test_no_bytes_are_answered_with_a_failure(serving: Serving) -> None:
    """Whatever is sent, no answer is 5xx, and the server goes on."""
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


async def test_the_limit_on_heads_holds_on_an_open_connection(serving: Serving) -> None:
    """A connection that has served may not grow a head without end."""
    async with serving.connect() as peer:
        assert (await peer.ask(infer_post())).status == 200
        await peer.send(b"POST /v2/models/" + b"a" * 100_000)
        assert (await peer.answer()).status == 431


async def test_a_refusal_before_the_end_of_the_body_is_the_last_answer(serving: Serving) -> None:
    """The client is told that the connection ends, so that it sends its next request elsewhere."""
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"POST /nothing", b"Content-Length: 1000", body=b"the beginning"))
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await peer.rest() == b""
    async with serving.connect() as peer:
        answer = await peer.ask(_request(b"POST /nothing", b"Content-Length: 3", body=b"all"))
        assert answer.status == 400
        if "connection" not in answer.headers:
            assert (await peer.ask(infer_post())).status == 200
