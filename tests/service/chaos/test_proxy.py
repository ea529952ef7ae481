"""The proxy of the chaos run, which cuts and half-closes connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import trio
import trio.testing

from tests.chaos.proxy import Proxy
from tests.support.waits import WAIT_SECONDS


async def _echo(stream: trio.SocketStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)


@asynccontextmanager
async def _proxied() -> AsyncIterator[tuple[Proxy, trio.SocketStream]]:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            proxy, port = await _open(nursery)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                yield proxy, stream
            nursery.cancel_scope.cancel()


async def _open(nursery: trio.Nursery) -> tuple[Proxy, int]:
    listeners = await nursery.start(trio.serve_tcp, _echo, 0)
    proxy = Proxy(listeners[0].socket.getsockname()[1])
    return proxy, await nursery.start(proxy.run)


async def test_a_proxy_passes_bytes_until_it_cuts() -> None:
    async with _proxied() as (proxy, stream):
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        assert proxy.cut() == 2
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""


async def test_a_half_closed_connection_ends() -> None:
    async with _proxied() as (proxy, stream):
        await stream.send_all(b"hello")
        await stream.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        await proxy.half_close(Random(0))
        assert await stream.receive_some() == b""
