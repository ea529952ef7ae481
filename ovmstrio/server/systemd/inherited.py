"""Sockets that a service manager has opened before it started the server: ``LISTEN_FDS`` and their names."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.systemd.notifier import Notifier

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from ovmstrio.server.plan import Plan

__all__ = ["managed"]

_FIRST: Final = 3
_NAMES: Final = ("grpc", "rest")
_MOST: Final = 64
_KEYS: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


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
    pid, number, names = (environ.pop(key, "") for key in _KEYS)
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
