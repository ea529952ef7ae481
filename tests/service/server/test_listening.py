"""Where a server listens."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
import trio

from ovmstrio.server.listening import open_noted_listeners
from ovmstrio.server.project_plan import own_port, plan_project
from ovmstrio.wire.listeners import address_of
from tests.support.projects import make_project


async def test_the_command_line_counts_more_than_the_file(tmp_path: Path) -> None:
    """Port 0 is any that is free, at each of the addresses; a socket file has none."""
    project = make_project(tmp_path, "", serve_port=1)
    usual = plan_project(project, {})
    assert own_port(project, usual.settings) == 1
    assert usual.rest == ("0.0.0.0:1",)
    plan = plan_project(project, {"port": 0, "rest_bind_address": f"127.0.0.1, unix:{tmp_path / 'socket'}"})
    async with open_noted_listeners(plan.rest, None, plan.port_options) as listeners:
        first, second = map(address_of, listeners)
        assert first.startswith("127.0.0.1:")
        assert not first.endswith(":0")
        assert second == f"unix:{tmp_path / 'socket'}"


async def test_an_address_that_is_in_use_is_named(tmp_path: Path) -> None:
    """With the way out; nothing is left open."""
    project = make_project(tmp_path, "")
    async with await _busy() as busy:
        port = busy.socket.getsockname()[1]
        plan = plan_project(project, {"port": port, "rest_bind_address": "127.0.0.1"})
        with pytest.raises(OSError, match="in use") as caught:
            async with open_noted_listeners(plan.rest, None, plan.port_options):
                raise AssertionError
    assert caught.value.errno == errno.EADDRINUSE
    where, way_out = caught.value.__notes__
    assert f"127.0.0.1:{port}" in where
    assert "--port" in way_out


async def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    """Another port would be no better."""
    plan = plan_project(make_project(tmp_path, ""), {"port": 0, "rest_bind_address": "no-such-host.invalid"})
    with pytest.raises(socket.gaierror) as caught:
        async with open_noted_listeners(plan.rest, None, plan.port_options):
            raise AssertionError
    assert caught.value.__notes__ == ["cannot listen at no-such-host.invalid:0"]


async def _busy() -> trio.SocketListener:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    return listener
