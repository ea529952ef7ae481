from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
import trio

from ovmstrio.isolation.channel import MessageChannel, packet_pair
from ovmstrio.isolation.messages import Message
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests
from ovmstrio.transport.direct_stream import DirectStream, close_forcefully
from ovmstrio.workers.handoff import ConnectionInbox
from tests.support.waits import WAIT_SECONDS


async def _connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0] as listener:
        client = await trio.open_tcp_stream(*listener.socket.getsockname())
        return client, await listener.accept()


class _Passing:
    def __init__(self, closed: Callable[[], None]) -> None:
        ours, theirs = (MessageChannel(end) for end in packet_pair())
        self.giver, self._taker = ours, theirs
        self.inbox = ConnectionInbox(closed)

    async def give(self, accepted: trio.SocketStream) -> None:
        await self.giver.send([0, ["REST", "203.0.113.9", 7]], accepted.socket.fileno())
        await accepted.aclose()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await WorkRequests(self._taker, nursery).handle_all(self.inbox.put)

    def close(self) -> None:
        self.giver.close()
        self._taker.close()


@contextmanager
def _passing(closed: Callable[[], None] = lambda: None) -> Iterator[_Passing]:
    passing = _Passing(closed)
    try:
        yield passing
    finally:
        passing.close()


@pytest.mark.parametrize("close", [close_forcefully, trio.aclose_forcefully, DirectStream.aclose])
async def test_a_connection_works_in_the_worker_and_its_end_is_reported_once(
    close: Callable[[Any], Awaitable[None]],
) -> None:
    ended: list[str] = []
    with _passing(lambda: ended.append("one")) as passing:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(passing.run)
            client, accepted = await _connected()
            await passing.give(accepted)
            stream = await passing.inbox.accept()
            assert isinstance(stream, DirectStream)
            assert (stream.peer_address.host, stream.peer_address.port) == ("203.0.113.9", 7)
            await client.send_all(b"ping")
            assert await stream.receive_some() == b"ping"
            await stream.send_all(b"pong")
            assert await client.receive_some() == b"pong"
            assert not ended
            await close(stream)
            await close(stream)
            assert await client.receive_some() == b""
            await client.aclose()
            passing.giver.finish()
        await passing.inbox.aclose()
    assert ended == ["one"]


async def test_a_connection_that_is_not_accepted_is_closed_with_the_inbox() -> None:
    with _passing() as passing:
        client, accepted = await _connected()
        await passing.give(accepted)
        passing.giver.finish()
        await passing.run()
        await passing.inbox.aclose()
        assert await client.receive_some() == b""
        await client.aclose()


async def test_the_inbox_ends_when_the_parent_closes_the_channel() -> None:
    with _passing() as passing:
        passing.giver.close()
        with trio.fail_after(WAIT_SECONDS):
            await passing.run()


async def test_connections_without_a_descriptor_are_reported_as_closed() -> None:
    ended: list[str] = []
    with _passing(lambda: ended.append("one")) as passing:
        message = Message([0, ["REST", "203.0.113.9", 7]], None)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await passing.inbox.put(WorkRequest(passing.giver, message))
        await passing.inbox.aclose()
    assert ended == ["one"] * 3
    assert [line["event"] for line in logs] == ["connections lost"]
