"""Sockets that were opened before the server was started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.server.listening import open_noted_listeners
from ovmstrio.server.plan import Plan, read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.systemd import managed
from ovmstrio.wire.accepting import Accepting
from ovmstrio.wire.listeners import address_of, is_inherited
from tests.support.waits import WAIT_SECONDS


async def _plan(tmp_path: Path) -> Plan:
    return await read_plan(ServerSettings(model_path=str(tmp_path), model_name="m", port=9000, rest_port=8000))


async def test_what_names_no_socket_leaves_the_addresses_as_they_are(tmp_path: Path) -> None:
    """Nor do sockets for another process; the variables are gone for those that are started from here."""
    plan = await _plan(tmp_path)
    for pid in (str(os.getpid() + 1), ""):
        environ = {"LISTEN_PID": pid, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "grpc", "HOME": "/"}
        found = managed(plan, environ)
        assert (found.grpc, found.rest) == (plan.grpc, plan.rest)
        assert environ == {"HOME": "/"}


async def test_a_socket_says_by_its_name_what_is_spoken_there(tmp_path: Path) -> None:
    """Another name is refused with the way out."""
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "ovms.socket"}
    with pytest.raises(ConfigError, match=r"expected grpc or rest, found ovms.socket.*FileDescriptorName=grpc"):
        managed(await _plan(tmp_path), environ)


async def test_a_descriptor_is_listened_at_and_its_socket_goes_on_without_this_server() -> None:
    """Who connects while nobody accepts is taken by the next one."""
    with socket.create_server(("127.0.0.1", 0)) as kept:
        port = kept.getsockname()[1]
        async with open_noted_listeners([f"fd:{os.dup(kept.fileno())}"], None, "") as (listener,):
            assert is_inherited(listener)
            assert address_of(listener) == f"127.0.0.1:{port}"
            async with await trio.open_tcp_stream("127.0.0.1", port) as client:
                await _answer_one(listener)
                assert await client.receive_some(10) == b"hello"
            await _stop_accepting(listener)
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as waiting,
            open_noted_listeners([f"fd:{os.dup(kept.fileno())}"], None, "") as (listener,),
        ):
            await _answer_one(listener)
            assert await waiting.receive_some(10) == b"hello"


async def _answer_one(listener: trio.abc.Listener[trio.SocketStream]) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with await listener.accept() as stream:
            await stream.send_all(b"hello")


async def _stop_accepting(listener: trio.abc.Listener[trio.SocketStream]) -> None:
    accepting = Accepting()
    accepting.stop()
    async with trio.open_nursery() as nursery:
        await accepting.run([listener], trio.sleep, nursery)


@pytest.mark.parametrize("address", ["fd:x", "fd:99999", "fd:"])
async def test_what_is_no_descriptor_is_refused(address: str) -> None:
    """As any address that is none."""
    with pytest.raises(ConfigError, match="expected fd:NUMBER of an open socket"):
        async with open_noted_listeners([address], None, ""):
            raise AssertionError


async def test_a_descriptor_of_something_else_is_refused() -> None:
    """Nobody can connect there; it is closed, for it was given away."""
    one, other = socket.socketpair()
    with one, other, pytest.raises(ConfigError, match="a stream socket that listens"):
        async with open_noted_listeners([f"fd:{one.detach()}"], None, ""):
            raise AssertionError
