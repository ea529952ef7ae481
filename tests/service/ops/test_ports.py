from __future__ import annotations

import socket

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.config.pipeline_file import Ports, choose_ports, is_free
from tests.support.ports import free_ports


def test_ports_that_are_given_are_taken() -> None:
    """Both ports are as the configuration has them, and gRPC alone means no HTTP."""
    rpc, http = free_ports(2)
    assert choose_ports(rpc, http) == Ports(rpc, http)
    assert choose_ports(rpc, None) == Ports(rpc, None)
    assert choose_ports(0, 0) == Ports(0, 0)


def test_http_alone_gives_grpc_the_next_free_port() -> None:
    """Without ``rpc_port``, gRPC gets the first port above that of HTTP on which nobody listens."""
    (http,) = free_ports(1)
    chosen = choose_ports(None, http)
    assert chosen.http == http
    assert chosen.rpc > http
    with socket.create_server(("127.0.0.1", chosen.rpc)):
        assert choose_ports(None, http).rpc > chosen.rpc


def test_ports_in_use_are_told_together() -> None:
    """Each port that somebody has is named with its key, whatever address it is in use at."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        rpc, http = one.getsockname()[1], other.getsockname()[1]
        assert not is_free(rpc)
        assert not is_free(http)
        with pytest.raises(ConfigError) as raised:
            choose_ports(rpc, http)
    assert [(problem.path, problem.message) for problem in raised.value.problems] == [
        ("rpc_port", f"port {rpc} is in use"),
        ("http_port", f"port {http} is in use"),
    ]


def test_one_port_is_needed() -> None:
    """A configuration without ports is refused."""
    with pytest.raises(ConfigError, match="rpc_port and http_port are both missing"):
        choose_ports(None, None)
