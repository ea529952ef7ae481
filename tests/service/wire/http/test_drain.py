"""The end of the HTTP front end: every request that was sent is answered, on either lane, and nobody holds it up."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.wire.http.ending import IDLE_GRACE_SECONDS
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving, infer_head, infer_post, serving_rest

FAST = infer_post()
APPLICATION = b"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\n\r\n"
SLOW = b'{"parameters":{"block":1},"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'
LANES = pytest.mark.parametrize("request_bytes", [FAST, APPLICATION], ids=["fast", "application"])
GRACE_SECONDS = 3600


@asynccontextmanager
async def _draining(serving: Serving) -> AsyncIterator[None]:
    """Drain beside the block, which is to be the last that the drain waits for."""
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
async def test_a_request_on_an_idle_connection_is_answered(serving: Serving, request_bytes: bytes) -> None:
    """It may have been on its way when the drain began; the answer is the connection's last."""
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await peer.rest() == b""


@LANES
async def test_a_first_request_is_answered(serving: Serving, request_bytes: bytes) -> None:
    """That of a connection that was made but not yet used, or not even accepted."""
    # The last connection has not been accepted yet, as no task has run since.
    async with serving.connect() as used, serving.connect() as waiting, _draining(serving):
        for peer in (waiting, used):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


@LANES
async def test_all_that_was_sent_at_once_is_answered(serving: Serving, request_bytes: bytes) -> None:
    """The last answer is the one that says so, and the connection ends then, and not with the grace."""
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            await peer.send(request_bytes * 5)
            answers = [await peer.answer() for _ in range(5)]
            assert [each.status for each in answers] == [200] * 5
            assert answers[-1].headers["connection"] == "close"
            assert await peer.rest() == b""


@LANES
async def test_answers_say_it_from_the_signal_on(serving: Serving, request_bytes: bytes) -> None:
    """While listeners are open still, clients are sent to other servers; who comes back is served."""
    serving.front_end.begin_drain()
    for _ in range(2):
        async with serving.connect() as peer:
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_an_answer_is_read_whole_whatever_its_client_sends(serving: Serving) -> None:
    """Bytes behind the last request do not reset the connection under the answer."""
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


@pytest.mark.parametrize("sent", [b"", FAST, APPLICATION], ids=["new", "fast", "application"])
async def test_idle_connections_get_a_grace_of_their_own(serving: Serving, sent: bytes) -> None:
    """They are closed after it, which cuts nothing."""
    async with serving.connect() as peer:
        if sent:
            await peer.ask(sent)
        began = trio.current_time()
        async with _draining(serving):
            assert await peer.rest() == b""
        assert trio.current_time() - began >= IDLE_GRACE_SECONDS


@LANES
async def test_a_short_grace_does_not_cut_idle_connections(serving: Serving, request_bytes: bytes) -> None:
    """What has no request loses none."""
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.05) == 0


async def test_what_was_sent_behind_a_request_in_progress_holds_nothing_up(serving: Serving) -> None:
    """On the application's lane the parser pauses there, and it has to end with the connection all the same."""
    async with serving.connect() as peer:
        head = infer_head(None, "Transfer-Encoding: chunked")
        await peer.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SLOW), SLOW) + APPLICATION)
        await serving.wait_blocked()
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1
        await serving.wait_closed()


@pytest.mark.parametrize("sent", [infer_head(100)[:-9], infer_head(100) + b"{", APPLICATION[:-7]])
async def test_half_a_request_is_cut_with_the_grace(tmp_path: Path, sent: bytes) -> None:
    """Its client may still send the rest of it, but not for ever."""
    async with serving_rest(tmp_path) as serving, serving.connect() as peer:
        await peer.send(sent)
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1


@pytest.mark.parametrize("steps", range(20))
async def test_a_drain_may_begin_while_a_connection_is_reset(serving: Serving, steps: int) -> None:
    """At any moment of the connection's way through the lanes to its end."""
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        await peer.send(APPLICATION)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    with trio.fail_after(60):
        assert await serving.front_end.drain(GRACE_SECONDS) == 0
    assert serving.front_end.open_connections == 0
