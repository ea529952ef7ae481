"""Restart in place: a server of one process drains, and its process executes the same command again.

::

    SIGHUP ─> configuration valid ─> drain ─> services closed ─> exec ─> load
                                  └─ listening sockets stay open: new connections wait for the new program ─┘

The process id stays, and so a service manager or container sees one process.  Imported code, options and the
environment are those of a fresh start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping, Sequence

    from ovmstrio.transport.listeners import Listener

_VARIABLE: Final = "OVMSTRIO_RESTART"
_SOCKET_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_start_folder = ""


def remember_start() -> None:
    """Remember the working directory of the command, because projects and scripts change it."""
    global _start_folder  # noqa: PLW0603 - a fact of the process
    with suppress(OSError):
        _start_folder = _start_folder or str(Path.cwd())


class InPlaceRestart:
    """State that a server of one process hands over to itself.

    Args:
        addresses: listen addresses before the restart, by protocol.
        descriptors: addresses of their open sockets, by protocol.
        expected: services that readiness expected before the restart; None at a first start.

    Attributes:
        is_requested: whether the process shall execute its command again once the server has ended.
    """

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]] | None = None,
        descriptors: Mapping[str, Sequence[str]] | None = None,
        expected: Sequence[str] | None = None,
    ) -> None:
        self._addresses = {**(addresses or {})}
        self._descriptors = {**(descriptors or {})}
        self.expected = expected
        self.is_requested = False

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> InPlaceRestart:
        """Return the state that this process has handed over to itself; its variable is removed."""
        remember_start()
        text = environ.pop(_VARIABLE, "")
        state: dict[str, Any] = json.loads(text) if text else {}
        if state.pop("pid", None) != os.getpid():
            return cls()
        for address in (each for some in state["descriptors"].values() for each in some):
            os.set_inheritable(_number(address), False)
        _reap_children()
        return cls(**state)

    def sockets(self, protocol: str, addresses: Sequence[str]) -> Sequence[str]:
        """Return addresses of the sockets that are open at these addresses, or else the addresses."""
        descriptors = self._descriptors.pop(protocol, ())
        if descriptors and (list(addresses) == self._addresses[protocol] or _is_inherited(descriptors)):
            return descriptors
        _close(descriptors)
        return addresses

    def request(
        self, listeners: Mapping[str, tuple[Sequence[str], Iterable[Listener]]], expected: Sequence[str] | None
    ) -> None:
        """Keep the sockets of listeners open, by protocol and with their addresses, and request the restart."""
        from ovmstrio.transport.listeners import keep_open  # noqa: PLC0415 - this module is imported first

        self._addresses = {name: list(addresses) for name, (addresses, _) in listeners.items()}
        self._descriptors = {name: [keep_open(each) for each in some] for name, (_, some) in listeners.items()}
        self.expected = expected
        self.is_requested = True

    def cancel(self) -> None:
        """Take a request back and close the kept sockets, because the server stops or does not use them."""
        self.is_requested = False
        while self._descriptors:
            _close(self._descriptors.popitem()[1])

    def execute(self) -> NoReturn:
        """Replace this program by a new start of its command; SIGHUP stays pending meanwhile."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        for address in (each for some in self._descriptors.values() for each in some):
            os.set_inheritable(_number(address), True)
        state = {"pid": os.getpid(), "addresses": self._addresses, "descriptors": self._descriptors}
        environ = {name: value for name, value in _initial_environ().items() if name not in _SOCKET_VARIABLES}
        environ[_VARIABLE] = json.dumps({**state, "expected": self.expected})
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(_start_folder or "/")
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)  # noqa: S606 - its own command


def own_ports(environ: Mapping[str, str]) -> set[int]:
    """Return the ports on which this process listened before its restart, until :meth:`InPlaceRestart.from_environ`."""
    addresses = json.loads(environ.get(_VARIABLE, "{}")).get("addresses", {}).values()
    ports = (address.rpartition(":")[2] for some in addresses for address in some)
    return {int(port) for port in ports if port.isdecimal()}


def _initial_environ() -> dict[str, str]:
    """Return the environment of the command, without changes by projects and the server."""
    lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(line).partition("=") for line in lines if line)
    return {name: value for name, _, value in pairs}


def _is_inherited(descriptors: Sequence[str]) -> bool:
    return descriptors[0].startswith("fd:")


def _number(address: str) -> int:
    return int(address.rpartition(":")[2])


def _close(addresses: Iterable[str]) -> None:
    for address in addresses:
        os.close(_number(address))


def _reap_children() -> None:
    """Collect children of the previous program that have ended; this one has none yet."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
