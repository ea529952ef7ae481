from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

import httpx
import pytest
import trio
import trio.testing

from ovmstrio.util.response_bodies import read_limited
from tests.support.waits import WAIT_SECONDS

_CHUNK = b"400\r\n" + b"x" * 1024 + b"\r\n"


async def _answer(chunks: int, ended: trio.Event, stream: trio.SocketStream) -> None:
    async with stream:
        with suppress(trio.BrokenResourceError):
            await _send_chunks(chunks, stream)
    ended.set()


async def _send_chunks(chunks: int, stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNK * chunks)
    if chunks < 5:
        await stream.send_all(b"0\r\n\r\n")
    await stream.receive_some()


@pytest.mark.parametrize(("chunks", "is_complete"), [(0, True), (4, True), (5, False), (500, False)])
async def test_a_body_is_read_up_to_the_limit_and_leaves_no_open_generator(chunks: int, is_complete: bool) -> None:
    ended = trio.Event()
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(
                partial(trio.serve_tcp, host="127.0.0.1"), partial(_answer, chunks, ended), 0
            )
            port = listeners[0].socket.getsockname()[1]
            async with httpx.AsyncClient(trust_env=False) as client:
                async with client.stream("GET", f"http://127.0.0.1:{port}/") as response:
                    body = await read_limited(response, 4096)
                assert (len(body) <= 4096) is is_complete
                if is_complete:
                    assert bytes(body) == b"x" * 1024 * chunks
                else:
                    await ended.wait()
            # Generators that are collected before their end warn, which is an error in tests.
            gc.collect()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_a_connection_that_breaks_is_an_error() -> None:
    async def break_off(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), break_off, 0)
            port = listeners[0].socket.getsockname()[1]
            async with (
                httpx.AsyncClient(trust_env=False) as client,
                client.stream("GET", f"http://127.0.0.1:{port}/") as response,
            ):
                with pytest.raises(httpx.RemoteProtocolError):
                    await read_limited(response, 4096)
            nursery.cancel_scope.cancel()
