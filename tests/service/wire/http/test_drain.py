from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.wire.http.ending import IDLE_GRACE_SECONDS
from tests.service.wire.http.requests import GET_METADATA, SLOW_BODY, chunked
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving, infer_head, infer_post, serving_rest

FAST = infer_post()
LANES = pytest.mark.parametrize("request_bytes", [FAST, GET_METADATA], ids=["fast", "application"])
GRACE_SECONDS = 3600


@asynccontextmanager
async def _draining(serving: Serving) -> AsyncIterator[None]:
    """Drain while the block runs; the drain must end with the block."""
    cut: list[int] = []

    async def drain() -> None:
        cut.append(await serving.front_end.drain(GRACE_SECONDS))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked(0.01)
            yield
    assert cut == [0]


@LANES
async def test_a_request_on_an_idle_connection_is_answered_during_a_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await peer.rest() == b""


@LANES
async def test_first_requests_of_open_and_unaccepted_connections_are_answered_during_a_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    # The last connection has not been accepted yet, as no task has run since.
    async with serving.connect() as used, serving.connect() as waiting, _draining(serving):
        for peer in (waiting, used):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


@LANES
async def test_pipelined_requests_are_answered_during_a_drain(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            await peer.send(request_bytes * 5)
            answers = [await peer.answer() for _ in range(5)]
            assert [each.status for each in answers] == [200] * 5
            assert answers[-1].headers["connection"] == "close"
            assert await peer.rest() == b""


@LANES
async def test_answers_say_connection_close_once_a_drain_has_begun(serving: Serving, request_bytes: bytes) -> None:
    serving.front_end.begin_drain()
    for _ in range(2):
        async with serving.connect() as peer:
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_bytes_sent_after_the_last_request_do_not_reset_the_connection(serving: Serving) -> None:
    numbers = b",".join([b"1.25"] * 200_000)
    body = b'{"inputs":[{"name":"x","shape":[200000],"datatype":"FP32","data":[%b]}]}' % numbers
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        async with _draining(serving):
            await peer.send(infer_post(body))
            await trio.testing.wait_all_tasks_blocked(0.1)
            await peer.send(b"GET / HTTP/1.1\r\n")
            answer = await peer.answer()
            assert len(answer.json["outputs"][0]["data"]) == 200_000
            assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("sent", [b"", FAST, GET_METADATA], ids=["new", "fast", "application"])
async def test_idle_connections_are_closed_after_the_idle_grace(serving: Serving, sent: bytes) -> None:
    async with serving.connect() as peer:
        if sent:
            await peer.ask(sent)
        began = trio.current_time()
        async with _draining(serving):
            assert await peer.rest() == b""
        assert trio.current_time() - began >= IDLE_GRACE_SECONDS


@LANES
async def test_a_short_grace_does_not_cut_idle_connections(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.05) == 0


async def test_a_pipelined_request_does_not_delay_the_end_of_a_drain(serving: Serving) -> None:
    async with serving.connect() as peer:
        await peer.send(chunked(SLOW_BODY) + GET_METADATA)
        await serving.wait_blocked()
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1
        await serving.wait_closed()


@pytest.mark.parametrize("sent", [infer_head(100)[:-9], infer_head(100) + b"{", GET_METADATA[:-7]])
async def test_an_incomplete_request_is_cut_off_after_the_grace(tmp_path: Path, sent: bytes) -> None:
    async with serving_rest(tmp_path) as serving, serving.connect() as peer:
        await peer.send(sent)
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1


@pytest.mark.parametrize("steps", range(20))
async def test_a_drain_may_begin_at_any_step_of_a_connection_reset(serving: Serving, steps: int) -> None:
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        await peer.send(GET_METADATA)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    with trio.fail_after(60):
        assert await serving.front_end.drain(GRACE_SECONDS) == 0
    assert serving.front_end.open_connections == 0
