from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.core.errors import ConfigError
from ovmstrio.server.listeners import open_server_listeners
from ovmstrio.server.plan import Plan, read_plan, with_service_manager
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.systemd import Notifier
from ovmstrio.serving.records import Readiness
from ovmstrio.transport.accept_loop import AcceptLoop
from ovmstrio.transport.listeners import bound_address, is_shared
from tests.support.descriptors import without_free_descriptors
from tests.support.waits import WAIT_SECONDS

# Inherited sockets


async def _plan(tmp_path: Path) -> Plan:
    return await read_plan(ServerSettings(model_path=str(tmp_path), model_name="m", port=9000, rest_port=8000))


async def test_environment_without_own_sockets_leaves_the_addresses(tmp_path: Path) -> None:
    plan = await _plan(tmp_path)
    for pid in (str(os.getpid() + 1), ""):
        environ = {"LISTEN_PID": pid, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "grpc", "HOME": "/"}
        found = with_service_manager(plan, environ)
        assert (found.grpc, found.rest) == (plan.grpc, plan.rest)
        assert environ == {"HOME": "/"}


async def test_socket_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "ovms.socket"}
    with pytest.raises(ConfigError, match=r"expected grpc or rest, found ovms.socket.*FileDescriptorName=grpc"):
        with_service_manager(await _plan(tmp_path), environ)


async def test_inherited_socket_is_used_and_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as kept:
        port = kept.getsockname()[1]
        async with open_server_listeners([f"fd:{os.dup(kept.fileno())}"], None, "") as (listener,):
            assert is_shared(listener)
            assert bound_address(listener) == f"127.0.0.1:{port}"
            async with await trio.open_tcp_stream("127.0.0.1", port) as client:
                await _answer_one(listener)
                assert await client.receive_some(10) == b"hello"
            await _stop_accepting(listener)
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as waiting,
            open_server_listeners([f"fd:{os.dup(kept.fileno())}"], None, "") as (listener,),
        ):
            await _answer_one(listener)
            assert await waiting.receive_some(10) == b"hello"


async def _answer_one(listener: trio.abc.Listener[trio.SocketStream]) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with await listener.accept() as stream:
            await stream.send_all(b"hello")


async def _stop_accepting(listener: trio.abc.Listener[trio.SocketStream]) -> None:
    accepting = AcceptLoop()
    accepting.stop()
    async with trio.open_nursery() as nursery:
        await accepting.run([listener], trio.sleep, nursery)


@pytest.mark.parametrize("address", ["fd:x", "fd:99999", "fd:"])
async def test_invalid_descriptor_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected fd:NUMBER of an open socket"):
        async with open_server_listeners([address], None, ""):
            raise AssertionError


async def test_descriptor_that_is_no_listening_socket_is_refused() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(ConfigError, match="a stream socket that listens"):
        async with open_server_listeners([f"fd:{one.detach()}"], None, ""):
            raise AssertionError


# Notifications


class _Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        texts = []
        with suppress(BlockingIOError):
            while True:
                texts.append(self._socket.recv(65_536).decode())
        return texts

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Manager]:
    found = _Manager(str(tmp_path / "notify") if request.param == "file" else f"@ovmstrio-test-{os.getpid()}")
    yield found
    found.close()


def test_readiness_is_sent_once_and_status_when_it_changes(manager: _Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.show(ready=False, reason="loading 1 of 2\n models")
    notifier.show(ready=False, reason="loading 1 of 2\n models")
    notifier.show(ready=True)
    notifier.show(ready=True)
    notifier.show(ready=False, reason="draining models")
    notifier.show(ready=True)
    assert manager.received() == [
        "STATUS=not ready: loading 1 of 2 models",
        "READY=1\nSTATUS=ready",
        "STATUS=not ready: draining models",
        "STATUS=ready",
    ]


def test_a_reason_that_is_no_utf8_is_sent(manager: _Manager) -> None:
    Notifier(manager.address).show(ready=False, reason="cannot read a\udcff.xml")
    assert manager.received() == ["STATUS=not ready: cannot read a?.xml"]


def test_readiness_that_found_no_room_is_sent_again(manager: _Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.show(ready=False)
    for number in range(10_000):
        notifier.show(ready=False, reason=str(number))
    notifier.show(ready=True)
    assert "READY=1" not in "".join(manager.received())
    notifier.show(ready=True)
    assert manager.received() == ["READY=1\nSTATUS=ready"]


async def test_watchdog_is_notified_without_a_free_descriptor(manager: _Manager, autojump_clock: MockClock) -> None:
    notifier = Notifier(manager.address, 10)
    notifier.show(ready=True)
    manager.received()
    with without_free_descriptors(), trio.move_on_after(16):
        await notifier.show_life()
    assert manager.received() == ["WATCHDOG=1"] * 4


def test_reload_is_sent_once_the_server_is_ready(manager: _Manager) -> None:
    notifier = Notifier(manager.address)
    with notifier.reloading():
        assert manager.received() == []
    notifier.show(ready=True)
    manager.received()
    with notifier.reloading():
        (text,) = manager.received()
    first, second, third = text.split("\n")
    assert (first, third) == ("RELOADING=1", "STATUS=reloading")
    assert second.startswith("MONOTONIC_USEC=")
    assert manager.received() == ["READY=1\nSTATUS=ready"]


def test_stop_is_sent_once_and_is_the_last_notification(manager: _Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.stop()
    notifier.stop()
    notifier.show(ready=True)
    with notifier.reloading():
        pass
    assert manager.received() == ["STOPPING=1\nSTATUS=draining"]


async def test_watchdog_is_notified_twice_per_interval(manager: _Manager, autojump_clock: MockClock) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environ(environ)
    assert environ == {}
    with trio.move_on_after(16):
        await notifier.show_life()
    assert manager.received() == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize("further", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
async def test_watchdog_is_not_notified_unless_requested(manager: _Manager, further: dict[str, str]) -> None:
    await Notifier.from_environ({"NOTIFY_SOCKET": manager.address, **further}).show_life()
    assert manager.received() == []


async def test_notifier_follows_readiness(manager: _Manager, autojump_clock: MockClock) -> None:
    notifier = Notifier(manager.address)
    state = [Readiness(ready=False, reason="loading")]
    changed = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.follow, lambda: state[0], changed.wait)
        await wait_all_tasks_blocked()
        assert manager.received() == ["STATUS=not ready: loading"]
        state[0] = Readiness(ready=True)
        await trio.sleep(6)
        assert manager.received() == ["READY=1\nSTATUS=ready"]
        nursery.cancel_scope.cancel()


def test_notifier_ignores_a_missing_manager(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "missing"))
    notifier.show(ready=True)
    notifier.stop()
    assert list(tmp_path.iterdir()) == []


async def test_notifier_without_manager_does_not_follow_readiness() -> None:
    await Notifier().follow(lambda: pytest.fail("readiness is read without a manager"), trio.sleep_forever)
