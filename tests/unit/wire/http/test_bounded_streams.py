"""Sending to clients that do not read, and closing on clients that still send."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from ovmstrio.core.pending_answers import PendingAnswers, current_share
from ovmstrio.wire.closing import LINGER_SECONDS
from ovmstrio.wire.direct_stream import direct
from ovmstrio.wire.http.bounded_sending import send_bounded
from ovmstrio.wire.http.prefixed_stream import PrefixedStream
from tests.support.waits import WAIT_SECONDS

STALLED_SECONDS = PendingAnswers().patience_seconds

Pair = tuple[trio.SocketStream, trio.SocketStream]


@pytest.fixture
async def sockets() -> AsyncIterator[Pair]:
    """Two ends of one connection."""
    left, right = trio.socket.socketpair()
    async with trio.SocketStream(left) as server, trio.SocketStream(right) as client:
        yield server, client


async def test_a_large_answer_arrives_whole() -> None:
    """It is sent in pieces, in order."""
    server, client = memory_stream_pair()
    data = bytes(range(256)) * 4096
    await send_bounded(server, data)
    await server.aclose()
    assert b"".join([piece async for piece in client]) == data


async def test_nothing_is_nothing() -> None:
    """An empty answer sends nothing."""
    server, client = memory_stream_pair()
    await send_bounded(server, b"")
    await server.aclose()
    assert await client.receive_some() == b""


async def test_nothing_is_sent_after_the_end(sockets: Pair) -> None:
    """The sender is told so at once, and does not try for ever."""
    server, _ = sockets
    stream = direct(server)
    await server.send_eof()
    with trio.fail_after(WAIT_SECONDS):
        await send_bounded(stream, b"")
        with pytest.raises(trio.ClosedResourceError):
            await send_bounded(stream, b"late")


async def test_a_client_that_reads_nothing_is_given_up(autojump_clock: MockClock, sockets: Pair) -> None:
    """The connection counts as broken after a while, not before."""
    server, _ = sockets
    started = trio.current_time()
    with pytest.raises(trio.BrokenResourceError, match="does not read"):
        await send_bounded(server, b"x" * 50_000_000)
    assert trio.current_time() - started == pytest.approx(STALLED_SECONDS, abs=1)


async def test_a_client_that_reads_slowly_is_served(autojump_clock: MockClock, sockets: Pair) -> None:
    """What counts is that it takes something, not how long the whole takes."""
    server, client = sockets
    taken = 0
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_bounded, server, b"x" * 3_000_000)
        while taken < 3_000_000:
            await trio.sleep(STALLED_SECONDS / 2)
            taken += len(await client.receive_some(10_000_000))
    assert trio.current_time() - started > 3 * STALLED_SECONDS


async def test_a_client_that_takes_crumbs_is_served(autojump_clock: MockClock, sockets: Pair) -> None:
    """A socket that takes nothing new because the client empties it slowly is no reason to give up."""
    server, client = sockets
    pending = PendingAnswers(stalled_seconds=10)
    current_share.set(pending.share())
    sent = trio.Event()

    async def send() -> None:
        await send_bounded(server, b"x" * 1_000_000)
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pending.watch)
        nursery.start_soon(send)
        left = 1_000_000
        for _ in range(15):
            await trio.sleep(3)
            left -= len(await client.receive_some(32_768))
            assert not sent.is_set()
        assert pending.budget.held == 1_000_000
        while left:
            left -= len(await client.receive_some(left))
        await sent.wait()
        nursery.cancel_scope.cancel()
    assert pending.budget.held == 0


async def test_a_client_that_stops_is_given_up_sooner_while_others_have_no_room(
    autojump_clock: MockClock, sockets: Pair
) -> None:
    """Somebody who waits for room waits for seconds, not for as long as clients may take nothing otherwise."""
    server, _ = sockets
    pending = PendingAnswers(1_000_000)
    current_share.set(pending.share())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pending.watch)

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError, match="does not read"):
                await send_bounded(server, b"x" * 2_000_000)

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        other = pending.share()
        await other.wait(1_000)
        assert 4 < trio.current_time() - started < 10
        nursery.cancel_scope.cancel()
    assert pending.budget.held == 1_000


async def test_bytes_that_were_read_before_come_first(sockets: Pair) -> None:
    """Then come those of the connection, and then its end."""
    server, client = sockets
    stream = PrefixedStream(server, b"first")
    await client.send_all(b"second")
    await client.send_eof()
    assert [await stream.receive_some(100) for _ in range(4)] == [b"first", b"second", b"", b""]


async def test_what_comes_after_the_last_answer_is_dropped(autojump_clock: MockClock, sockets: Pair) -> None:
    """The client sees the end at once and may finish sending, within a bound."""
    server, client = sockets
    stream = PrefixedStream(server, b"")
    async with trio.open_nursery() as nursery:
        received: list[bytes] = []

        async def read() -> None:
            received.append(await stream.receive_some(100))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        await stream.finish()
        assert await client.receive_some() == b""
        for _ in range(3):
            await client.send_all(b"late" * 10_000)
    assert received == [b""]
    assert trio.current_time() - started == pytest.approx(LINGER_SECONDS)
    assert await stream.receive_some() == b""


async def test_a_connection_that_broke_can_be_finished_and_closed(sockets: Pair) -> None:
    """The end of a connection is no error."""
    server, client = sockets
    stream = PrefixedStream(server, b"")
    await client.aclose()
    await stream.finish()
    await stream.aclose()
    await stream.finish()
    await stream.aclose()
