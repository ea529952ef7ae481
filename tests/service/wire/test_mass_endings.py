from __future__ import annotations

import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Literal

import pytest
import trio
import trio.testing
from grpclib.encoding.proto import ProtoCodec

from ovmstrio.wire.grpc.server import GrpcServer
from ovmstrio.wire.http.http_server import HttpFrontEnd
from ovmstrio.wire.http.router import Router
from tests.support.waits import until_async

Kind = Literal["grpc", "http"]
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"
_MOST_A_TURN = 64
_COUNTS = [300, pytest.param(5000, marks=pytest.mark.slow)]


class _Turns(trio.abc.Instrument):
    """Records how many connections end in each turn of the loop."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last = count()
        self.most = 0

    def before_io_wait(self, timeout: float) -> None:
        """Compare with the last turn."""
        del timeout
        now = self._count()
        self.most, self._last = max(self.most, self._last - now), now


@asynccontextmanager
async def _served(kind: Kind) -> AsyncIterator[tuple[Any, Callable[[], int], int]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        if kind == "grpc":
            grpc = GrpcServer([], ProtoCodec())
            await nursery.start(grpc.serve, [listener])
            yield grpc, lambda: len(grpc.connections), port
        else:
            refusals: Any = None
            http = HttpFrontEnd([], Router([], refusals))
            await nursery.start(http.serve_listeners, [listener])
            yield http, lambda: http.open_connections, port
        nursery.cancel_scope.cancel()


@contextmanager
def _clients(kind: Kind, count: int, port: int) -> Iterator[list[socket.socket]]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 3 * count:
        pytest.skip(f"the system lets a process have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection(("127.0.0.1", port)))
            if kind == "grpc":
                sockets[-1].sendall(_HELLO)
        yield sockets
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("how", ["clients leave", "server drains"])
@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_few_connections_end_per_turn_of_the_event_loop(kind: Kind, how: str, count: int) -> None:
    async with _served(kind) as (server, opened, port):
        connecting = _clients(kind, count, port)
        sockets = await trio.to_thread.run_sync(connecting.__enter__)
        try:
            await until_async(lambda: opened() == count)
            await trio.testing.wait_all_tasks_blocked(0.1)
            turns = _Turns(opened)
            trio.lowlevel.add_instrument(turns)
            if how == "clients leave":
                for each in sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                await until_async(lambda: opened() == 0)
            else:
                with trio.fail_after(60):
                    assert await server.drain(10) == 0
                assert opened() == 0
            trio.lowlevel.remove_instrument(turns)
            assert 0 < turns.most <= _MOST_A_TURN
        finally:
            connecting.__exit__(None, None, None)
