from __future__ import annotations

import errno
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import trio
import trio.testing
from grpclib.encoding.proto import ProtoCodec
from trio.testing import MockClock

from ovmstrio.core.connection import Loopback
from ovmstrio.transport.accept_loop import HANDSHAKE_SETTLE_SECONDS, PAUSE_SECONDS, AcceptLoop
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.http.router import Router
from ovmstrio.transport.http.server import HttpFrontEnd
from ovmstrio.transport.listeners import listener_socket, open_listeners
from tests.support.waits import WAIT_SECONDS, until_async

ADDRESSES = ["127.0.0.1:0", "[::1]:0", "unix"]


async def _greet(stream: trio.SocketStream) -> None:
    await stream.send_all(b"hello")


def _address(kind: str, folder: Path) -> str:
    return f"unix:{folder / 'listener.sock'}" if kind == "unix" else kind


def _client(listener: trio.abc.Listener[trio.abc.Stream]) -> socket.socket:
    sock = listener_socket(listener)
    assert sock is not None
    client = socket.socket(sock.family, socket.SOCK_STREAM)
    client.settimeout(5)
    client.connect(sock.getsockname())
    return client


@pytest.mark.parametrize("kind", ADDRESSES)
async def test_clients_in_the_backlog_are_served_before_a_listener_ends(tmp_path: Path, kind: str) -> None:
    accepting = AcceptLoop()
    async with open_listeners([_address(kind, tmp_path)]) as listeners, trio.open_nursery() as nursery:
        clients = [_client(listeners[0]) for _ in range(20)]
        accepting.stop()
        with trio.fail_after(WAIT_SECONDS):
            await accepting.run(listeners, _greet, nursery)
        for client in clients:
            with client:
                assert client.recv(10) == b"hello"
    assert accepting.ended.is_set()


@pytest.mark.parametrize("kind", ADDRESSES)
async def test_a_busy_server_accepts_the_entire_backlog_before_a_listener_ends(tmp_path: Path, kind: str) -> None:
    accepting = AcceptLoop()

    async def block(stream: trio.SocketStream) -> None:
        await stream.send_all(b"hello")
        threading.Event().wait(HANDSHAKE_SETTLE_SECONDS)

    async with open_listeners([_address(kind, tmp_path)]) as listeners, trio.open_nursery() as nursery:
        clients = [_client(listeners[0]) for _ in range(10)]
        accepting.stop()
        await accepting.run(listeners, block, nursery)
        for client in clients:
            with client:
                assert client.recv(10) == b"hello"


@pytest.mark.parametrize("kind", ADDRESSES[:2])
async def test_clients_that_connect_while_a_listener_ends_are_refused(kind: str) -> None:
    accepting = AcceptLoop()
    async with open_listeners([kind]) as listeners, trio.open_nursery() as nursery:
        nursery.start_soon(accepting.run, listeners, _greet, nursery)
        await trio.testing.wait_all_tasks_blocked()
        sock = listener_socket(listeners[0])
        assert sock is not None
        name = sock.getsockname()
        accepting.stop()
        await trio.testing.wait_all_tasks_blocked()
        with socket.socket(sock.family, socket.SOCK_STREAM) as late:
            late.setblocking(False)
            assert late.connect_ex(name) == errno.EINPROGRESS
            await accepting.ended.wait()
            with trio.fail_after(WAIT_SECONDS), suppress(OSError):
                await trio.lowlevel.wait_writable(late)
            assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


async def test_errors_of_single_connections_do_not_end_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [errno.ECONNABORTED, errno.EPROTO, errno.ENETUNREACH]
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        sock = listener_socket(listener)
        assert sock is not None
        accept = sock.accept

        async def fail_first() -> object:
            if failures:
                raise OSError(failures.pop(0), "no")
            return await accept()

        monkeypatch.setattr(sock, "accept", fail_first)
        with _client(listener) as client, trio.fail_after(WAIT_SECONDS):
            stream = await listener.accept()
            assert stream.peer_address == Loopback(*client.getsockname())
            await stream.aclose()
        failures.append(errno.EMFILE)
        with pytest.raises(OSError, match="no"):
            await listener.accept()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


class _Full(trio.abc.Listener[trio.abc.Stream]):
    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self.tries = 0

    async def accept(self) -> trio.abc.Stream:
        self.tries += 1
        if self._is_full():
            raise OSError(errno.EMFILE, "no")
        if self.tries < 0:
            await trio.sleep_forever()
        self.tries = -100
        return trio.testing.memory_stream_pair()[0]

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_accepting_pauses_without_descriptors_and_logs_once_a_second(autojump_clock: MockClock) -> None:
    accepted = trio.Event()
    began = trio.current_time()

    async def accept(_: object) -> None:
        accepted.set()

    listener = _Full(lambda: trio.current_time() < began + 10)
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(AcceptLoop().run, [listener], accept, nursery)
            await trio.sleep(9.99)
            assert listener.tries == pytest.approx(10 / PAUSE_SECONDS, abs=2)
            with trio.fail_after(1):
                await accepted.wait()
            nursery.cancel_scope.cancel()
    pauses = [line for line in logs if line["event"] == "accept paused"]
    assert len(pauses) == pytest.approx(10, abs=1)
    assert "EMFILE" in pauses[0]["reason"]
    assert pauses[-1]["pauses"] > 80


async def test_the_end_of_a_listener_without_descriptors_waits_for_the_backlog(autojump_clock: MockClock) -> None:
    accepting, accepted = AcceptLoop(), trio.Event()
    began = trio.current_time()

    async def accept(_: object) -> None:
        accepted.set()

    async with trio.open_nursery() as nursery:
        listener = _Full(lambda: trio.current_time() < began + 5)
        nursery.start_soon(accepting.run, [listener], accept, nursery)
        await trio.testing.wait_all_tasks_blocked()
        accepting.stop()
        await accepting.ended.wait()
    assert accepted.is_set()
    assert trio.current_time() - began == pytest.approx(5 + 2 * HANDSHAKE_SETTLE_SECONDS, abs=0.3)


AT_ONCE = 8


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _connect(clients: ExitStack, port: int, count: int) -> list[socket.socket]:
    return [
        clients.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)))
        for _ in range(count)
    ]


async def test_connections_accepted_ahead_end_with_the_listener(clients: ExitStack) -> None:
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        listening = listener_socket(listener)
        assert listening is not None
        near, *others = _connect(clients, listening.getsockname()[1], 3)
        accepted = await listener.accept()
        await listener.aclose()
        await accepted.send_all(b"served")
        assert near.recv(10) == b"served"
        for client in others:
            assert client.recv(10) == b""
        await accepted.aclose()


async def test_closing_a_listener_twice_closes_no_other_descriptor() -> None:
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        await listener.aclose()
        with socket.create_server(("127.0.0.1", 0)) as other:
            await listener.aclose()
            assert other.getsockname()[1]


Kind = Literal["grpc", "http"]
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"
_MOST_A_TURN = 64
_COUNTS = [300, pytest.param(5000, marks=pytest.mark.slow)]


class _Turns(trio.abc.Instrument):
    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last = count()
        self.most = 0

    def before_io_wait(self, timeout: float) -> None:
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
