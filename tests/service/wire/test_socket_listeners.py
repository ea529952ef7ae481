"""Connections that several clients make at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import trio

from ovmstrio.wire.listeners import open_listeners, socket_of
from tests.support.waits import WAIT_SECONDS

AT_ONCE = 8


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """What closes the clients of a test."""
    with ExitStack() as stack:
        yield stack


def _connect(clients: ExitStack, port: int, count: int) -> list[socket.socket]:
    return [
        clients.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)))
        for _ in range(count)
    ]


async def test_a_few_that_wait_are_accepted_in_one_turn_of_the_loop(clients: ExitStack) -> None:
    """The others get theirs in the next turn, in which whatever else is ready has had its own."""
    accepted = list[tuple[str, int]]()

    async def accept() -> None:
        stream = await listener.accept()
        accepted.append(stream.socket.getpeername())
        stream.socket.close()

    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        listening = socket_of(listener)
        assert listening is not None
        asking = _connect(clients, listening.getsockname()[1], AT_ONCE + 1)
        await accept()
        with trio.CancelScope() as scope:
            scope.cancel()
            for _ in asking:
                await accept()
        assert len(accepted) == AT_ONCE
        assert scope.cancelled_caught
        await accept()
    assert sorted(accepted) == sorted(client.getsockname() for client in asking)


async def test_connections_that_nobody_asked_for_end_with_the_listener(clients: ExitStack) -> None:
    """Their clients are told at once, and none of them holds a descriptor."""
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        listening = socket_of(listener)
        assert listening is not None
        near, *others = _connect(clients, listening.getsockname()[1], 3)
        accepted = await listener.accept()
        await listener.aclose()
        await accepted.send_all(b"served")
        assert near.recv(10) == b"served"
        for client in others:
            assert client.recv(10) == b""
        await accepted.aclose()


async def test_a_listener_that_is_closed_twice_closes_nothing_else() -> None:
    """The number of its descriptor may be another's by then."""
    async with open_listeners(["127.0.0.1:0"]) as (listener,):
        await listener.aclose()
        with socket.create_server(("127.0.0.1", 0)) as other:
            await listener.aclose()
            assert other.getsockname()[1]
