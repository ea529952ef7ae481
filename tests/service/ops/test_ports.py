from __future__ import annotations

import socket

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops.config_file import Ports, choose_ports, is_port_free
from tests.support.ports import free_ports


def test_configured_ports_are_used() -> None:
    rpc, http = free_ports(2)
    for ports in ((rpc, http), (rpc, None), (0, 0)):
        assert choose_ports(*ports) == Ports(*ports)


def test_grpc_gets_the_next_free_port_above_that_of_http() -> None:
    (http,) = free_ports(1)
    chosen = choose_ports(None, http)
    assert chosen.http == http
    assert chosen.rpc > http
    with socket.create_server(("127.0.0.1", chosen.rpc)):
        assert choose_ports(None, http).rpc > chosen.rpc


def test_all_ports_in_use_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        rpc, http = one.getsockname()[1], other.getsockname()[1]
        assert not is_port_free(rpc)
        assert not is_port_free(http)
        with pytest.raises(ConfigError) as raised:
            choose_ports(rpc, http)
    assert [(problem.path, problem.message) for problem in raised.value.problems] == [
        ("rpc_port", f"port {rpc} is in use"),
        ("http_port", f"port {http} is in use"),
    ]


def test_one_port_is_needed() -> None:
    with pytest.raises(ConfigError, match="rpc_port and http_port are both missing"):
        choose_ports(None, None)
