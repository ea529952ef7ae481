"""Service manager integration: ``sd_notify`` messages and socket activation (``LISTEN_FDS``)."""

from __future__ import annotations

import math
import os
import socket
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    from ovmstrio.serving.records import Readiness

# Notifications

_POLL_SECONDS: Final = 5.0
"""Poll interval for the readiness reason; changes of services are reported at once."""
_MAX_STATUS_CHARACTERS: Final = 400
_NOTIFY_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Sender of ``sd_notify`` messages; does nothing without an address.

    Args:
        address: path of a datagram socket, or ``@name`` for an abstract socket.
        watchdog_seconds: watchdog timeout of the service manager.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = math.inf) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._has_sent_ready = False
        self._is_stopping = False
        self._status = ""

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Create a notifier and remove its variables from the environment, so that child processes do not notify."""
        address, interval, pid = (environ.pop(key, "") for key in _NOTIFY_VARIABLES)
        is_watched = interval.isdecimal() and int(interval) > 0 and pid in {"", str(os.getpid())}
        return cls(address, int(interval) / 1e6 if is_watched else math.inf)

    @property
    def is_enabled(self) -> bool:
        """True if there is a service manager."""
        return bool(self._address)

    def show(self, *, ready: bool, reason: str = "") -> None:
        """Send readiness and status; what could not be sent is sent by the next call."""
        if self._is_stopping:
            return
        status = "ready" if ready else f"not ready: {reason or 'starting'}"
        lines = [] if status == self._status else [f"STATUS={_one_line(status)}"]
        if ready and not self._has_sent_ready:
            lines.insert(0, "READY=1")
        if self._send(lines):
            self._status = status
            self._has_sent_ready = self._has_sent_ready or ready

    def stop(self) -> None:
        """Send the start of the shutdown; later only watchdog messages are sent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send(["STOPPING=1", "STATUS=draining"])

    def restart(self) -> None:
        """Send the start of a restart of this process, which sends its end after its new start."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send([*_reload_lines(), "STATUS=restarting"])

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Send the start and end of a reload around the block."""
        if self._has_sent_ready and not self._is_stopping:
            self._send([*_reload_lines(), "STATUS=reloading"])
        try:
            yield
        finally:
            if self._has_sent_ready and not self._is_stopping:
                self._send(["READY=1", f"STATUS={_one_line(self._status)}"])

    async def follow(self, readiness: Callable[[], Readiness], wait_change: Callable[[], Awaitable[object]]) -> None:
        """Send readiness changes until cancelled; returns at once without a service manager."""
        while self.is_enabled:
            state = readiness()
            self.show(ready=state.ready, reason=state.reason)
            with trio.move_on_after(_POLL_SECONDS):
                await wait_change()

    async def show_life(self) -> None:
        """Send watchdog messages at half the timeout until cancelled.

        A stuck event loop sends none, and the service manager restarts the server.
        """
        while self.is_enabled and self._watchdog_seconds < math.inf:
            self._send(["WATCHDOG=1"])
            await trio.sleep(self._watchdog_seconds / 2)

    def _send(self, lines: list[str]) -> bool:
        """Send one datagram without blocking; a full socket drops it.  Return False if it was not sent."""
        if not self._address or not lines:
            return True
        try:
            if self._socket is None:
                # Kept, so that the watchdog is notified also if all descriptors are in use later.
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                weakref.finalize(self, self._socket.close)
            # File names in a reason may not be UTF-8.
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def _reload_lines() -> list[str]:
    return ["RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_STATUS_CHARACTERS]


# Socket activation

_FIRST_FD: Final = 3
_NAMES: Final = ("grpc", "rest")
_MAX_SOCKETS: Final = 64
_SOCKET_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited_addresses(environ: MutableMapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return addresses of inherited sockets by protocol; the variables are removed from the environment.

    Raises:
        ConfigError: the name of a socket is no protocol.
    """
    pid, number, names = (environ.pop(key, "") for key in _SOCKET_VARIABLES)
    if pid != str(os.getpid()) or not number.isdecimal() or not 0 < int(number) <= _MAX_SOCKETS:
        return {}
    given = names.split(":") if names else []
    found: dict[str, tuple[str, ...]] = {}
    for index in range(int(number)):
        name = given[index] if index < len(given) else ""
        if name not in _NAMES:
            raise ConfigError([_unknown_socket(_FIRST_FD + index, name)])
        os.set_inheritable(_FIRST_FD + index, False)
        found[name] = (*found.get(name, ()), f"fd:{_FIRST_FD + index}")
    return found


def _unknown_socket(descriptor: int, name: str) -> Problem:
    return Problem(
        f"inherited socket {descriptor}: unknown name",
        path="LISTEN_FDNAMES",
        expected=" or ".join(_NAMES),
        found=name or "no name",
        suggestion="write FileDescriptorName=grpc or FileDescriptorName=rest in the socket unit",
    )
