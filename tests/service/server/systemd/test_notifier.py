"""What a service manager is told, as it arrives at a socket like its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.registry.states import Readiness
from ovmstrio.server.systemd.notifier import Notifier
from tests.support.waits import WAIT_SECONDS


class Manager:
    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        told = []
        while True:
            try:
                told.append(self._socket.recv(65_536).decode())
            except BlockingIOError:
                return told

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """A manager at a file, or at a name without one."""
    found = Manager(str(tmp_path / "notify") if request.param == "file" else f"@ovmstrio-test-{os.getpid()}")
    yield found
    found.close()


def test_it_is_ready_once_and_its_status_is_told_when_it_changes(manager: Manager) -> None:
    """Why it is not ready is one line."""
    notifier = Notifier(manager.address)
    notifier.show(ready=False, reason="loading 1 of 2\n models")
    notifier.show(ready=False, reason="loading 1 of 2\n models")
    notifier.show(ready=True)
    notifier.show(ready=True)
    notifier.show(ready=False, reason="gone")
    notifier.show(ready=True)
    assert manager.heard() == [
        "STATUS=not ready: loading 1 of 2 models",
        "READY=1\nSTATUS=ready",
        "STATUS=not ready: gone",
        "STATUS=ready",
    ]


def test_a_reload_is_told_of_once_the_server_is_ready(manager: Manager) -> None:
    """With the time at which it began; readiness comes back with its end."""
    notifier = Notifier(manager.address)
    with notifier.reloading():
        assert manager.heard() == []
    notifier.show(ready=True)
    manager.heard()
    with notifier.reloading():
        (told,) = manager.heard()
    first, second, third = told.split("\n")
    assert (first, third) == ("RELOADING=1", "STATUS=reloading")
    assert second.startswith("MONOTONIC_USEC=")
    assert manager.heard() == ["READY=1\nSTATUS=ready"]


def test_nothing_follows_the_end_but_signs_of_life(manager: Manager) -> None:
    """It is told of once."""
    notifier = Notifier(manager.address)
    notifier.stop()
    notifier.stop()
    notifier.show(ready=True)
    with notifier.reloading():
        pass
    assert manager.heard() == ["STOPPING=1\nSTATUS=draining"]


async def test_the_loop_gives_signs_of_life_twice_as_often_as_asked_for(
    manager: Manager, autojump_clock: MockClock
) -> None:
    """From its beginning on."""
    del autojump_clock
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.of_environment(environ)
    assert environ == {}
    with trio.move_on_after(16):
        await notifier.show_life()
    assert manager.heard() == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize("further", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
async def test_no_signs_of_life_are_given_that_nobody_asked_for(manager: Manager, further: dict[str, str]) -> None:
    """Nor those for another process."""
    await Notifier.of_environment({"NOTIFY_SOCKET": manager.address, **further}).show_life()
    assert manager.heard() == []


async def test_readiness_is_followed(manager: Manager, autojump_clock: MockClock) -> None:
    """At every change, and at the latest after some seconds."""
    del autojump_clock
    notifier = Notifier(manager.address)
    state = [Readiness(ready=False, reason="loading")]
    changed = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.follow, lambda: state[0], changed.wait)
        await wait_all_tasks_blocked()
        assert manager.heard() == ["STATUS=not ready: loading"]
        state[0] = Readiness(ready=True)
        await trio.sleep(6)
        assert manager.heard() == ["READY=1\nSTATUS=ready"]
        nursery.cancel_scope.cancel()


async def test_without_a_manager_or_after_its_end_nothing_happens(tmp_path: Path) -> None:
    """The server goes on."""
    for notifier in (Notifier(), Notifier(str(tmp_path / "nobody"))):
        notifier.show(ready=True)
        notifier.stop()
    with trio.fail_after(WAIT_SECONDS):
        await Notifier().follow(lambda: Readiness(ready=True), trio.sleep_forever)
