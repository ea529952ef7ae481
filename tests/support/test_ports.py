"""Ports that tests give to servers."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ports import free_ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="the kernel does not say which ports clients get")
def test_no_client_is_given_a_port_that_a_server_was_promised() -> None:
    """They lie outside those from which the kernel chooses the near ends of connections."""
    first, last = map(int, RANGE.read_text().split())
    assert not [port for port in free_ports(50) if first <= port <= last]


def test_a_port_is_promised_once() -> None:
    """Two servers of one test never get the same, whichever threads ask for them."""
    with ThreadPoolExecutor(4) as threads:
        ports = [port for found in threads.map(free_ports, [10] * 4) for port in found]
    assert len(set(ports)) == 40


def test_a_port_in_use_is_passed_over() -> None:
    """Whoever listens already keeps its port."""
    with ExitStack() as stack:
        for port in free_ports(5):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert port not in free_ports(1_500)
