"""Listeners end without losing a connection that a client believes in, and rest while the system has no room."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock

from ovmstrio.core.peers import Loopback
from ovmstrio.wire.accepting import PAUSE_SECONDS, SETTLE_SECONDS, Accepting
from ovmstrio.wire.listeners import open_listeners, socket_of
from tests.support.waits import WAIT_SECONDS

ADDRESSES = ["127.0.0.1:0", "[::1]:0", "unix"]


class _Greeter:
    """Greets whoever comes, and can be kept from it."""

    def __init__(self) -> None:
        self.greeted = 0

    async def __call__(self, stream: trio.SocketStream) -> None:
        """Greet one client."""
        self.greeted += 1
        await stream.send_all(b"hello")


def _address(kind: str, folder: Path) -> str:
    return f"unix:{folder / 'listener.sock'}" if kind == "unix" else kind


def _client(listener: trio.abc.Listener[trio.abc.Stream]) -> socket.socket:
    sock = socket_of(listener)
    assert sock is not None
    client = socket.socket(sock.family, socket.SOCK_STREAM)
    client.settimeout(5)
    client.connect(sock.getsockname())
    return client


@pytest.mark.parametrize("kind", ADDRESSES)
async def test_who_waits_when_the_end_comes_is_served(tmp_path: Path, kind: str) -> None:
    """Those in the queue of the system are accepted before the listener closes; later ones are refused."""
    greeter, accepting = _Greeter(), Accepting()
    async with open_listeners([_address(kind, tmp_path)]) as listeners, trio.open_nursery() as nursery:
        # Nobody accepts yet, so that all of them wait.
        clients = [_client(listeners[0]) for _ in range(20)]
        accepting.stop()
        with trio.fail_after(WAIT_SECONDS):
            await accepting.run(listeners, greeter, nursery)
        for client in clients:
            with client:
                assert client.recv(10) == b"hello"
    assert greeter.greeted == 20
    assert accepting.ended.is_set()


@pytest.mark.parametrize("kind", ADDRESSES)
async def test_a_busy_server_accepts_all_of_them(tmp_path: Path, kind: str) -> None:
    """However little it gets around to in the time that the end would take otherwise."""
    accepting = Accepting()

    async def block(stream: trio.SocketStream) -> None:
        await stream.send_all(b"hello")
        threading.Event().wait(SETTLE_SECONDS)

    async with open_listeners([_address(kind, tmp_path)]) as listeners, trio.open_nursery() as nursery:
        clients = [_client(listeners[0]) for _ in range(10)]
        accepting.stop()
        await accepting.run(listeners, block, nursery)
        for client in clients:
            with client:
                assert client.recv(10) == b"hello"


@pytest.mark.parametrize("kind", ADDRESSES[:2])
async def test_no_handshake_begins_once_the_end_has_come(kind: str) -> None:
    """A client that comes while the last ones are accepted is not let in to be thrown out; it tries again."""
    accepting = Accepting()
    async with open_listeners([kind]) as listeners, trio.open_nursery() as nursery:
        nursery.start_soon(accepting.run, listeners, _Greeter(), nursery)
        await trio.testing.wait_all_tasks_blocked()
        sock = socket_of(listeners[0])
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


async def test_connections_that_fail_before_they_are_accepted_end_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is accepted; what is wrong with the listener itself is raised."""
    failures = [errno.ECONNABORTED, errno.EPROTO, errno.ENETUNREACH]
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        sock = socket_of(listener)
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
    """A listener that the system refuses descriptors."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self.tries = 0

    async def accept(self) -> trio.abc.Stream:
        """Fail, or give one connection and then none."""
        self.tries += 1
        if self._is_full():
            raise OSError(errno.EMFILE, "no")
        if self.tries < 0:
            await trio.sleep_forever()
        self.tries = -100
        return trio.testing.memory_stream_pair()[0]

    async def aclose(self) -> None:
        """Close nothing."""
        await trio.lowlevel.checkpoint()


async def test_without_descriptors_accepting_pauses(autojump_clock: MockClock) -> None:
    """It is tried again after a moment, told once a second, and goes on when there is room."""
    accepted = trio.Event()
    began = trio.current_time()

    async def accept(_: object) -> None:
        accepted.set()

    listener = _Full(lambda: trio.current_time() < began + 10)
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Accepting().run, [listener], accept, nursery)
            await trio.sleep(9.99)
            assert listener.tries == pytest.approx(10 / PAUSE_SECONDS, abs=2)
            with trio.fail_after(1):
                await accepted.wait()
            nursery.cancel_scope.cancel()
    told = [line for line in logs if line["event"] == "accepting pauses"]
    assert len(told) == pytest.approx(10, abs=1)
    assert "EMFILE" in told[0]["reason"]
    assert told[-1]["pauses"] > 80


async def test_an_end_without_descriptors_waits_for_room(autojump_clock: MockClock) -> None:
    """Those who wait are not thrown out for it."""
    accepting, accepted = Accepting(), trio.Event()
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
    assert trio.current_time() - began == pytest.approx(5 + 2 * SETTLE_SECONDS, abs=0.3)
