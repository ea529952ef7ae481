"""What hypercorn and quart-trio get wrong by themselves, asked of this server: each costs one connection at most."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, Peer, Serving, infer_head, infer_post, serving_rest

MEBIBYTE = 2**20
GET_METADATA = b"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"
"""What sends an inference to the application instead of the fast lane."""

SLOW = b'{"parameters":{"block":1},"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunked(body: bytes) -> bytes:
    return infer_head(None, CHUNKED) + _chunk(body) + b"0\r\n\r\n"


async def _still_serves(serving: Serving) -> None:
    """Ask on a connection of its own, in both ways."""
    async with serving.connect() as peer:
        assert (await peer.ask(infer_post())).status == 200
        assert (await peer.ask(GET_METADATA)).status == 200


@asynccontextmanager
async def _small(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving_rest(tmp_path, front_end={"max_body_bytes": MEBIBYTE}) as serving:
        yield serving


@pytest.mark.parametrize("extra", [[], ["Connection: close"], ["Expect: 100-continue"]], ids=["", "close", "expect"])
async def test_an_upload_that_is_refused_early_sees_why(tmp_path: Path, extra: list[str]) -> None:
    """Defects A and F: bytes that follow the answer harm nobody, and the answer is not lost among them."""
    async with _small(tmp_path) as serving:
        async with serving.connect() as peer:
            await peer.send(infer_head(4 * MEBIBYTE, *extra) + b" " * 100_000)
            answer = await peer.answer()
            assert answer.status == 413
            assert "--max_message_size" in answer.json["error"]
            for _ in range(4):
                await peer.send(b" " * 100_000)
            await peer.stream.aclose()
        await _still_serves(serving)
        await serving.wait_closed()


async def test_a_chunked_upload_is_refused_when_it_is_too_large(tmp_path: Path) -> None:
    """No length is said in advance, so what has come is counted, and what comes after the answer is dropped."""
    async with _small(tmp_path) as serving:
        async with serving.connect() as peer:
            await peer.send(infer_head(None, CHUNKED))
            for _ in range(12):
                await peer.send(_chunk(b" " * 100_000))
            answer = await peer.answer()
            assert answer.status == 413
            assert str(MEBIBYTE) in answer.json["error"]
        await _still_serves(serving)
        await serving.wait_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
        b"\0" * 1_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
        infer_head(None, CHUNKED) + b"zz\r\n",
        infer_head(None, CHUNKED) + _chunk(BODY) + b"5\r\nab\r\n0\r\n\r\n",
        GET_METADATA + b"\xff\xfe garbage behind a request\r\n\r\n",
    ],
    ids=["tls", "zeros", "version", "chunk size", "chunk end", "behind a request"],
)
async def test_bytes_that_are_no_http_cost_one_connection(serving: Serving, garbage: bytes) -> None:
    """Defect B: an error on one connection reaches neither the server nor a call on another one."""
    async with serving.connect() as other:
        await other.send(infer_post(SLOW))
        await serving.wait_blocked()
        async with serving.connect() as peer:
            await peer.send(garbage)
            await peer.stream.send_eof()  # type: ignore[attr-defined]
            answered = await peer.rest()
            assert b" 500 " not in answered
        await _still_serves(serving)
        assert not serving.servable.cancelled.is_set()


@pytest.mark.parametrize("request_bytes", [infer_post(SLOW), _chunked(SLOW), GET_METADATA, _chunked(SLOW)[:-20]])
async def test_a_connection_that_is_reset_costs_itself(serving: Serving, request_bytes: bytes) -> None:
    """Defect B: whatever the server was doing for it when the reset came."""
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        if request_bytes.endswith((b"}", b"0\r\n\r\n")):
            await serving.wait_blocked()
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await serving.wait_closed()
    await _still_serves(serving)


async def _ask_for_much(peer: Peer, count: int, head: bytes) -> None:
    """Fill the way back with answers that nobody reads, until the server stops taking requests."""
    with trio.move_on_after(0.3):
        for _ in range(count):
            await peer.stream.send_all(head)


@pytest.mark.parametrize("lane", ["fast", "application"])
async def test_a_client_that_does_not_read_bounds_nothing(serving: Serving, lane: str) -> None:
    """Defect C: neither other clients nor the end of the server wait for it."""
    numbers = b",".join([b"1.25"] * 100_000)
    body = b'{"inputs":[{"name":"x","shape":[100000],"datatype":"FP32","data":[%b]}]}' % numbers
    request = infer_post(body) if lane == "fast" else _chunked(body)
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await _ask_for_much(peer, 40, request)
        await _still_serves(serving)
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert serving.front_end.open_connections == 0


@pytest.mark.parametrize("request_bytes", [infer_post(SLOW), _chunked(SLOW)], ids=["fast", "application"])
async def test_a_call_without_end_bounds_nothing(serving: Serving, request_bytes: bytes) -> None:
    """The drain gives a call its grace, and then cancels it."""
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        await serving.wait_blocked()
        began = trio.current_time()
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert trio.current_time() - began >= 0.5
        assert serving.servable.cancelled.is_set()
        assert serving.front_end.open_connections == 0


async def test_idle_connections_end_with_the_drain_at_once(serving: Serving) -> None:
    """On either lane, before any request, and between two."""
    async with serving.connect() as fresh, serving.connect() as fast, serving.connect() as application:
        await fast.ask(infer_post())
        await application.ask(GET_METADATA)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(3600)
        assert [await peer.rest() for peer in (fresh, fast, application)] == [b"", b"", b""]


async def test_a_body_that_nobody_reads_blocks_nobody(serving: Serving) -> None:
    """Defect E: a path that ignores its body answers without it, while the client still sends."""
    body = b"x" * 300_000
    async with serving.connect() as peer:
        head = b"POST /v2/nothing HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.send, head + body)
            answer = await peer.answer()
        assert answer.status == 400
        if answer.headers.get("connection") == "close":
            assert await peer.rest() == b""
        else:
            assert (await peer.ask(GET_METADATA)).status == 200
        await _still_serves(serving)


@pytest.mark.parametrize(
    "preface",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    ],
    ids=["preface", "preface and settings"],
)
async def test_http2_without_asking_is_refused_in_http1(serving: Serving, preface: bytes) -> None:
    """HTTP/2 is not spoken: a client that begins so is told in HTTP/1.1, and nothing hangs."""
    async with serving.connect() as peer:
        answer = await peer.ask(preface)
        assert 400 <= answer.status < 500
        assert "error" in answer.json
        await peer.rest()
    await _still_serves(serving)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_upgrade_is_not_heard(serving: Serving, protocol: str) -> None:
    """The request is answered as if no upgrade had been asked for, and the connection goes on."""
    upgrade = f"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n"
    more = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    async with serving.connect() as peer:
        answer = await peer.ask((upgrade + more).encode())
        assert answer.status == 200
        assert answer.json["name"] == "echo"
        assert (await peer.ask(GET_METADATA)).status == 200


async def test_many_connections_leave_nothing(serving: Serving) -> None:
    """Whatever way they end, no connection is counted as open afterwards."""

    async def use(number: int) -> None:
        async with serving.connect() as peer:
            request = (infer_post(), GET_METADATA, infer_post()[:-5], b"garbage\r\n\r\n", b"")[number % 5]
            await peer.send(request)
            if number % 5 < 2:
                await peer.answer()

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(use, number)
    await serving.wait_closed()
    assert serving.front_end.open_connections == 0
