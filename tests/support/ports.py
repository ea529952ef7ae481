"""Ports of loopback for programs that have to be told theirs, which nothing else takes before they listen."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_COUNT = 12_000
_WORKERS = 8

_candidates: dict[int, Iterator[int]] = {}
"""By process, as a child that was forked would go on where its parent does."""
_looking = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Find loopback ports that nobody listens on, and that are not given twice within a process.

    They lie below those that the kernel gives to clients: a port of these may be the near end of anybody's
    connection by the time that a server listens, which then fails.
    """
    process = os.getpid()
    with _looking:
        if process not in _candidates:
            _candidates[process] = _shuffled(process)
        return list(itertools.islice(filter(_is_free, _candidates[process]), count))


@contextmanager
def refusing_port() -> Iterator[int]:
    """Return a loopback port that refuses connections: it stays bound, and nothing listens on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _shuffled(process: int) -> Iterator[int]:
    first_of_clients = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    ports = list(range(max(1_024, first_of_clients - _COUNT), first_of_clients))[worker::_WORKERS]
    # Processes that begin at one place would find the same ports.
    random.Random(process).shuffle(ports)
    return itertools.cycle(ports)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
