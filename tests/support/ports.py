"""Ports of loopback for programs that have to be told theirs, which nothing else takes before they listen."""

from __future__ import annotations

import itertools
import os
import random
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["free_ports"]

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_COUNT = 12_000


def free_ports(count: int) -> list[int]:
    """Find loopback ports that nobody listens on, and that are not given twice within a process.

    They lie below those that the kernel gives to clients: a port of these may be the near end of anybody's
    connection by the time that a server listens, which then fails.
    """
    return list(itertools.islice(filter(_is_free, _candidates()), count))


@cache
def _candidates() -> Iterator[int]:
    first_of_clients = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    ports = list(range(max(1_024, first_of_clients - _COUNT), first_of_clients))
    # Processes of one run of the tests that begin at one place would find the same ports.
    random.Random(os.getpid()).shuffle(ports)
    return itertools.cycle(ports)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
