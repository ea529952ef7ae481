"""Reserved loopback ports for programs that need their port as an argument."""

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
    """Find free loopback ports; a process never gets the same port twice.

    The ports are below the ephemeral range: a port of that range may be the local port of a client
    connection by the time that the server binds it.
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
