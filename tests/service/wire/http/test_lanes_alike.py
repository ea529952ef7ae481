from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovmstrio.dataplane.guarded_plane import GuardedPlane
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.wire.http.answers import Cors
from tests.service.api.rest.handlers.servers import serving_handler
from tests.service.wire.http.conftest import chunk
from tests.support.callers import gate_of
from tests.support.examples import examples
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.unit.api.rest.servers import BODY, serving_rest

HANDLER: Final = """
from ovmstrio.handlers import HTTPError, Response

class Handler:
    def handle_post(self, payload, headers, query_params):
        if payload == "refuse":
            raise HTTPError(418, "short", {"X-Kind": "pot", "Retry-After": " 3 "})
        if payload == "fail":
            raise ValueError("a secret")
        names = sorted(set(headers) - {"te", "content-length", "transfer-encoding"})
        return {"payload": str(payload), "names": names, "query": dict(query_params)}

    def handle_get(self, query_params):
        for number in range(int(query_params.get("count", "2"))):
            yield f"{number};" * 3

    def handle_put(self, payload):
        return Response("made", int(payload or 201), headers={"X-One": "1", "Date": "never", "Set-Cookie": "a=b"})

    def handle_delete(self):
        return Response(status_code=204, headers={"X-Two": "2"})
"""
DATE: Final = re.compile(rb"date: [A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT\r\n")
PATIENCE_SECONDS: Final = 20
Address = str


def _head(verb: str, target: str, *lines: str, host: str = "h") -> bytes:
    return "\r\n".join([f"{verb} {target} HTTP/1.1", f"Host: {host}", *lines, "\r\n"]).encode("latin-1")


async def _raw(address: Address, request: bytes) -> bytes:
    """Send a request twice, the second time with Connection: close, and return both answers without dates."""
    host, _, port = address.rpartition(":")
    last = request.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nConnection: close\r\n", 1)
    received = b""
    with trio.fail_after(PATIENCE_SECONDS):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request + last)
            async for data in stream:
                received += data
    dates = DATE.findall(received)
    assert len(dates) == received.count(b"HTTP/1.1 "), received
    return DATE.sub(b"date: now\r\n", received)


async def _assert_alike(address: Address, verb: str, target: str, lines: tuple[str, ...], body: bytes) -> bytes:
    """Send a request to the fast lane, and twice to the application; return the two answers of the fast lane."""
    length = f"Content-Length: {len(body)}"
    fast = await _raw(address, _head(verb, target, *lines, length) + body)
    application = await _raw(address, _head(verb, target, *lines, "TE: trailers", length) + body)
    chunks = chunk(body) + b"0\r\n\r\n"
    in_chunks = await _raw(address, _head(verb, target, *lines, "Transfer-Encoding: chunked") + chunks)
    assert fast == application == in_chunks
    return fast


@asynccontextmanager
async def _models(folder: Path, *, plane_class: type[DataPlane] = DataPlane, **options: Any) -> AsyncIterator[Address]:
    async with serving_rest(folder, front_end=options, plane_class=plane_class) as serving:
        yield serving.address


@asynccontextmanager
async def _handler(folder: Path) -> AsyncIterator[Address]:
    async with serving_handler(folder, HANDLER) as served:
        yield served.address


@asynccontextmanager
async def _ops(folder: Path) -> AsyncIterator[Address]:
    del folder
    async with serving_pipeline(EchoExecutor(), http_status=True) as running:
        yield running.rest[0]


SERVERS: Final[dict[str, Callable[[Path], Any]]] = {
    "models": _models,
    "models for pages": partial(_models, cors=Cors("http://a, http://b", credentials=True)),
    "models of known callers": partial(_models, plane_class=GuardedPlane, gate=gate_of({"good": "infer:echo read"})),
    "a handler": _handler,
    "Ops": _ops,
}
TARGETS: Final = [
    *("/", "/?count=3", "/?count=0&a=%20x", "/info", "/nothing", "//", "/..", "/%2f", "/?"),
    *("/v2/models/echo/infer", "/v2/models/echo/infer?a=1", "/v2/models/ec%68o/infer/", "/v2/models/%ff/infer"),
    *("/v2/modelshttp://h/echo/infer", "http://h/v2/models/echo/infer", "//v2/models/echo/infer"),
    *("/v2/models/a%2fb/infer", "/v2/models/../infer", "/v2/models/echo/versions/x/infer", "/v2/models/a/b/infer"),
    f"/v2/models/echo/versions/1{20 * '0'}/infer",
    *("/v1/models/echo:predict", "/v1/models/echo/versions/2:predict", "/v1/models/echo%3Apredict", "/v1/models/x/y"),
    *("/v2", "/v2/models/echo", "/v1/config", "/metrics", "/v2/models/uci/infer"),
    *("/uci/prediction", "/uci/", "/uci", "/uci/uci/prediction", "/nope/prediction"),
    *("/uci/health", "/health", "/a/b/c"),
]
BODIES: Final = [b"", b"{", BODY, b'"refuse"', b'"fail"', b'{"key":["x"],"value":["1"]}', b'{"instances":[1]}', b"204"]
LINES: Final = [
    *("Content-Type: application/json", "Accept: application/json", "Origin: http://a", "Origin: http://c"),
    *("X-Request-Id: a-1", "Connection: keep-alive", "Inference-Header-Content-Length: 3", "X-Empty:"),
    *("Authorization: Bearer good", "X-Api-Key: good", "accept: text/*"),
]


@pytest.mark.parametrize("server", SERVERS)
async def test_both_lanes_answer_with_the_same_bytes(tmp_path: Path, server: str) -> None:
    requests: list[tuple[str, str, tuple[str, ...], bytes]] = []

    @settings(max_examples=examples(120), database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["POST", "POST", "GET", "PUT", "PATCH", "DELETE"]),
        st.sampled_from(TARGETS),
        st.lists(st.sampled_from(LINES), max_size=3, unique_by=lambda line: line.partition(":")[0].lower()).map(tuple),
        st.sampled_from(BODIES),
    )
    def collect(verb: str, target: str, lines: tuple[str, ...], body: bytes) -> None:
        requests.append((verb, target, lines, body))

    collect()
    async with SERVERS[server](tmp_path) as address:
        for each in requests:
            with_id = (*each[2], "X-Request-Id: b-2") if not any("Id" in line for line in each[2]) else each[2]
            await _assert_alike(address, each[0], each[1], with_id, each[3])


@pytest.mark.parametrize(
    ("verb", "target", "body", "expected"),
    [
        ("DELETE", "/", b"", b"HTTP/1.1 204 No Content\r\ndate: now\r\nx-two: 2\r\n"),
        ("PUT", "/", b"299", b"HTTP/1.1 299 \r\ndate: now\r\n"),
        ("GET", "/", b"", b"\r\ntransfer-encoding: chunked\r\n\r\n6\r\n0;0;0;\r\n"),
        ("GET", "/", b"", b"\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n6\r\n"),
        (
            "PATCH",
            "/",
            b"",
            b"HTTP/1.1 405 Method Not Allowed\r\ndate: now\r\nallow: DELETE, GET, OPTIONS, POST, PUT\r\n",
        ),
        ("POST", "/", b'"fail"', b"HTTP/1.1 500 Internal Server Error\r\ndate: now\r\n"),
        ("GET", "/v2", b"", b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\ncontent-length: "),
    ],
)
async def test_answers_have_the_same_form_in_both_lanes(
    tmp_path: Path, verb: str, target: str, body: bytes, expected: bytes
) -> None:
    lines = ("Content-Type: application/json", "X-Request-Id: a")
    async with _handler(tmp_path) as address:
        assert expected in await _assert_alike(address, verb, target, lines, body)


async def test_head_is_answered_with_the_head_of_get(tmp_path: Path) -> None:
    async with _models(tmp_path) as address:
        for target in ("/v2", "/v2/models/echo", "/v1/config", "/v2/models/nobody"):
            got = await _raw(address, _head("GET", target))
            assert (await _raw(address, _head("HEAD", target))).split(b"\r\n\r\n")[0] == got.split(b"\r\n\r\n")[0]


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "127..0.1:80", "-", "[::1", "a:b"])
async def test_an_invalid_host_is_answered_as_any_other(tmp_path: Path, host: str) -> None:
    async with _models(tmp_path) as address:
        for line in ("X: y", "TE: trailers"):
            answers = await _raw(address, _head("GET", "/v2", line, host=host))
            assert answers.count(b"HTTP/1.1 200 ") == 2
