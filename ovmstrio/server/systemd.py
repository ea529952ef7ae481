"""Sockets that a service manager has opened before it started the server: ``LISTEN_FDS`` and their names."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    from ovmstrio.server.plan import Plan
    from ovmstrio.serving.records import Readiness

__all__ = ["Notifier", "managed"]

# ----------------------------------------------------------------------
# News for a service manager, in the way of ``sd_notify``: datagrams of ``KEY=value`` lines to a Unix socket
# ----------------------------------------------------------------------

_LOOK_SECONDS: Final = 5.0
"""How often the reason for not being ready is looked at; changes of what is served are heard of at once."""
_MOST_STATUS: Final = 400
_NOTIFY_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells a service manager how the server does; without an address it tells nobody.

    Args:
        address: the path of a datagram socket, ``@name`` for one without a file.
        watchdog_seconds: how long the manager waits for a sign of life.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = math.inf) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._was_ready = False
        self._is_stopping = False
        self._status = ""

    @classmethod
    def of_environment(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Take what the manager says out of the environment, so that no other process speaks for this one."""
        address, interval, pid = (environ.pop(key, "") for key in _NOTIFY_VARIABLES)
        is_watched = interval.isdecimal() and int(interval) > 0 and pid in {"", str(os.getpid())}
        return cls(address, int(interval) / 1e6 if is_watched else math.inf)

    @property
    def is_heard(self) -> bool:
        """Whether there is a manager."""
        return bool(self._address)

    def show(self, *, ready: bool, reason: str = "") -> None:
        """Tell whether the server is ready, and if not, why; that it is ready the manager is told once."""
        if self._is_stopping:
            return
        status = "ready" if ready else f"not ready: {reason or 'starting'}"
        lines = [] if status == self._status else [f"STATUS={_one_line(status)}"]
        if ready and not self._was_ready:
            self._was_ready = True
            lines.insert(0, "READY=1")
        self._status = status
        self._tell(lines)

    def stop(self) -> None:
        """Tell that the server ends; nothing else is told from then on, but signs of life."""
        if not self._is_stopping:
            self._is_stopping = True
            self._tell(["STOPPING=1", "STATUS=draining"])

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Tell that the configuration is loaded again while the block lasts."""
        if self._was_ready and not self._is_stopping:
            self._tell(["RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading"])
        try:
            yield
        finally:
            if self._was_ready and not self._is_stopping:
                self._tell(["READY=1", f"STATUS={_one_line(self._status)}"])

    async def follow(self, readiness: Callable[[], Readiness], wait_change: Callable[[], Awaitable[object]]) -> None:
        """Tell how ready the server is, until cancelled; returns at once where nobody hears it.

        Cancellation: at any checkpoint.
        """
        while self.is_heard:
            state = readiness()
            self.show(ready=state.ready, reason=state.reason)
            with trio.move_on_after(_LOOK_SECONDS):
                await wait_change()

    async def show_life(self) -> None:
        """Give a sign of life from the event loop twice as often as the manager asks for, until cancelled.

        A loop that is stuck gives none, and the manager ends the server and starts another one.

        Cancellation: at any checkpoint.
        """
        while self.is_heard and self._watchdog_seconds < math.inf:
            self._tell(["WATCHDOG=1"])
            await trio.sleep(self._watchdog_seconds / 2)

    def _tell(self, lines: list[str]) -> None:
        """Send one datagram; a manager that does not take it now misses it, for the loop must not wait for it."""
        if not self._address or not lines:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MOST_STATUS]


# ----------------------------------------------------------------------
# Sockets that a service manager has opened before it started the server: ``LISTEN_FDS`` and their names
# ----------------------------------------------------------------------

_FIRST: Final = 3
_NAMES: Final = ("grpc", "rest")
_MOST: Final = 64
_SOCKET_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def managed(plan: Plan, environ: MutableMapping[str, str]) -> Plan:
    """Give a plan what a service manager has for its process: sockets in place of addresses, and an ear for its news.

    What the manager has written is taken out of the environment, for it is meant for this process alone.

    Raises:
        ConfigError: a socket has a name that says no protocol.
    """
    named = _inherited(environ)
    return replace(
        plan,
        grpc=named.get("grpc") or plan.grpc,
        rest=named.get("rest") or plan.rest,
        notifier=Notifier.of_environment(environ),
    )


def _inherited(environ: MutableMapping[str, str]) -> dict[str, tuple[str, ...]]:
    """List the addresses of sockets by what is spoken there."""
    pid, number, names = (environ.pop(key, "") for key in _SOCKET_VARIABLES)
    if pid != str(os.getpid()) or not number.isdecimal() or not 0 < int(number) <= _MOST:
        return {}
    given = names.split(":") if names else []
    found: dict[str, tuple[str, ...]] = {}
    for index in range(int(number)):
        name = given[index] if index < len(given) else ""
        if name not in _NAMES:
            raise ConfigError([_unknown(_FIRST + index, name)])
        os.set_inheritable(_FIRST + index, False)
        found[name] = (*found.get(name, ()), f"fd:{_FIRST + index}")
    return found


def _unknown(descriptor: int, name: str) -> Problem:
    return Problem(
        f"the inherited socket {descriptor} cannot be used: its name does not say what is spoken there",
        path="LISTEN_FDNAMES",
        expected=" or ".join(_NAMES),
        found=name or "no name",
        suggestion="write FileDescriptorName=grpc or FileDescriptorName=rest in the socket unit",
    )
