"""The two ports of a pipeline: which are wanted, which are free, and what to say where they are not."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["Ports", "choose_ports", "is_free"]

_LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a pipeline listens: ``rpc`` for gRPC, ``http`` for HTTP or None; 0 lets the system choose."""

    rpc: int
    http: int | None


def choose_ports(rpc_port: int | None, http_port: int | None) -> Ports:
    """Settle the ports of a configuration; blocking, but only for system calls.

    With ``http_port`` alone, gRPC gets the next port above that is free; with ``rpc_port`` alone there is no HTTP.

    Raises:
        ConfigError: neither port is given, or one that is given is in use.
    """
    if rpc_port is None and http_port is None:
        suggestion = "give at least one of them, such as `http_port: 9999`"
        raise ConfigError([Problem("rpc_port and http_port are both missing", suggestion=suggestion)])
    named = (("rpc_port", rpc_port), ("http_port", http_port))
    taken = [_in_use(key, port) for key, port in named if port is not None and not is_free(port)]
    if taken:
        raise ConfigError(taken)
    return Ports(_next_free(http_port or 0) if rpc_port is None else rpc_port, http_port)


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a port of any address; 0 is always free."""
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_ipv6 else [])]
    return all(_can_bind(family, port) for family in families)


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # a family that this machine does not have cannot be in anybody's way
    with closing(probe):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return _is_no_address(family, error)
    return True


def _is_no_address(family: socket.AddressFamily, error: OSError) -> bool:
    """Tell whether a bind failed because IPv6 is switched off, which says nothing of the port."""
    return family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL


def _next_free(above: int) -> int:
    for port in range(above + 1, _LAST_PORT + 1):
        if is_free(port):
            return port
    message = f"no port above {above} is free for gRPC"
    raise ConfigError([Problem(message, path="rpc_port", suggestion="give `rpc_port`")])


def _in_use(key: str, port: int) -> Problem:
    return Problem(
        f"port {port} is in use",
        path=key,
        suggestion="choose another, or end the program that has it",
    )
