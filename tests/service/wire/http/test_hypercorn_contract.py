"""Faults of hypercorn and quart-trio, which cost this server one connection at most."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.service.wire.http.requests import GET_METADATA, MEBIBYTE, SLOW_BODY, chunk, chunked
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, Peer, Serving, infer_head, infer_post, serving_rest

CHUNKED = "Transfer-Encoding: chunked"


async def _still_serves(serving: Serving) -> None:
    async with serving.connect() as peer:
        assert (await peer.ask(infer_post())).status == 200
        assert (await peer.ask(GET_METADATA)).status == 200


SPACES = b" " * 100_000


@pytest.mark.parametrize(
    ("start", "more"),
    [
        pytest.param(infer_head(4 * MEBIBYTE) + SPACES, SPACES, id="length"),
        pytest.param(infer_head(4 * MEBIBYTE, "Connection: close") + SPACES, SPACES, id="close"),
        pytest.param(infer_head(4 * MEBIBYTE, "Expect: 100-continue") + SPACES, SPACES, id="expect"),
        pytest.param(infer_head(None, CHUNKED) + chunk(SPACES) * 12, chunk(SPACES), id="chunked"),
    ],
)
async def test_an_upload_above_the_limit_gets_its_answer_before_its_end(
    tmp_path: Path, start: bytes, more: bytes
) -> None:
    async with serving_rest(tmp_path, front_end={"max_body_bytes": MEBIBYTE}) as serving:
        async with serving.connect() as peer:
            await peer.send(start)
            answer = await peer.answer()
            assert answer.status == 413
            assert "--max_message_size" in answer.json["error"]
            assert str(MEBIBYTE) in answer.json["error"]
            for _ in range(4):
                await peer.send(more)
            await peer.stream.aclose()
        await _still_serves(serving)
        await serving.wait_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
        b"\0" * 1_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
        infer_head(None, CHUNKED) + b"zz\r\n",
        infer_head(None, CHUNKED) + chunk(BODY) + b"5\r\nab\r\n0\r\n\r\n",
        GET_METADATA + b"\xff\xfe garbage behind a request\r\n\r\n",
    ],
    ids=["tls", "zeros", "version", "chunk size", "chunk end", "behind a request"],
)
async def test_bytes_that_are_not_http_end_only_their_connection(serving: Serving, garbage: bytes) -> None:
    async with serving.connect() as other:
        await other.send(infer_post(SLOW_BODY))
        await serving.wait_blocked()
        async with serving.connect() as peer:
            await peer.send(garbage)
            await peer.stream.send_eof()  # type: ignore[attr-defined]
            answered = await peer.rest()
            assert b" 500 " not in answered
        await _still_serves(serving)
        assert not serving.servable.cancelled.is_set()


@pytest.mark.parametrize(
    "request_bytes", [infer_post(SLOW_BODY), chunked(SLOW_BODY), GET_METADATA, chunked(SLOW_BODY)[:-20]]
)
async def test_a_reset_ends_only_its_connection(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        if request_bytes.endswith((b"}", b"0\r\n\r\n")):
            await serving.wait_blocked()
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await serving.wait_closed()
    await _still_serves(serving)


async def _ask_for_much(peer: Peer, count: int, head: bytes) -> None:
    with trio.move_on_after(0.3):
        for _ in range(count):
            await peer.stream.send_all(head)


@pytest.mark.parametrize("lane", ["fast", "application"])
async def test_a_client_that_does_not_read_delays_neither_others_nor_the_drain(serving: Serving, lane: str) -> None:
    numbers = b",".join([b"1.25"] * 100_000)
    body = b'{"inputs":[{"name":"x","shape":[100000],"datatype":"FP32","data":[%b]}]}' % numbers
    request = infer_post(body) if lane == "fast" else chunked(body)
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await _ask_for_much(peer, 40, request)
        await _still_serves(serving)
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert serving.front_end.open_connections == 0


@pytest.mark.parametrize("request_bytes", [infer_post(SLOW_BODY), chunked(SLOW_BODY)], ids=["fast", "application"])
async def test_an_endless_call_is_cancelled_after_the_grace_of_the_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        await serving.wait_blocked()
        began = trio.current_time()
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert trio.current_time() - began >= 0.5
        assert serving.servable.cancelled.is_set()
        assert serving.front_end.open_connections == 0


async def test_an_unread_body_does_not_block_its_answer(serving: Serving) -> None:
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
    async with serving.connect() as peer:
        answer = await peer.ask(preface)
        assert 400 <= answer.status < 500
        assert "error" in answer.json
        await peer.rest()
    await _still_serves(serving)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_upgrades_are_ignored(serving: Serving, protocol: str) -> None:
    upgrade = f"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n"
    more = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    async with serving.connect() as peer:
        answer = await peer.ask((upgrade + more).encode())
        assert answer.status == 200
        assert answer.json["name"] == "echo"
        assert (await peer.ask(GET_METADATA)).status == 200


async def test_no_connection_remains_after_many_ends(serving: Serving) -> None:
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
