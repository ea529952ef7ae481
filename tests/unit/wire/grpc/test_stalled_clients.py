"""Clients that leave their answers where they are, against a bare HTTP/2 peer on virtual time."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.core.pending_answers import PendingAnswers
from ovmstrio.wire.grpc import TransportLimits, frames
from ovmstrio.wire.grpc.frames import ErrorCode
from tests.unit.wire.grpc.bytes_client import HELLO, data, headers, message, request_headers
from tests.unit.wire.grpc.peers import Peer, memory_server

CLOSED = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}


async def close_windows(peer: Peer) -> None:
    """Let a peer allow no bytes of streams, but for those that it grants each of them."""
    peer.h2.update_settings(CLOSED)
    await peer.flush()
    while sum(isinstance(each, h2.events.SettingsAcknowledged) for each in peer.events) < 2:
        await peer.read()


async def closed(peer: Peer) -> Peer:
    """Start a peer that allows no bytes of streams."""
    await peer.start()
    await close_windows(peer)
    return peer


async def keep_alive(peer: Peer) -> None:
    """Answer what the server asks, and read nothing else."""
    while await peer.read():
        pass


async def test_what_waits_for_windows_is_counted_and_given_back(autojump_clock: MockClock) -> None:
    """Every byte that is encoded counts for its connection until the peer has taken it or has gone."""
    pending = PendingAnswers()
    async with memory_server(pending=pending) as (_, _, connect):
        one, two = await closed(connect()), await closed(connect())
        first = await one.request("Unary", b"x" * 995)
        await two.request("Split", b"3 1995")
        await trio.testing.wait_all_tasks_blocked()
        assert pending.budget.held == 1_000 + 2_000
        one.h2.increment_flow_control_window(400, first)
        await one.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert pending.budget.held == 600 + 2_000
        one.h2.increment_flow_control_window(600, first)
        await one.flush()
        assert (await one.trailers(first))["grpc-status"] == "0"
        assert pending.budget.held == 2_000
        await two.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert pending.budget.held == 0


async def test_a_connection_on_which_nothing_moves_is_cut_off(
    autojump_clock: MockClock, logs: list[MutableMapping[str, Any]]
) -> None:
    """A peer with no window whose answers wait for a minute loses its connection, though it answers PINGs."""
    pending = PendingAnswers()
    async with memory_server(pending=pending) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"never read")
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_alive, peer)
            for _ in range(59):
                await trio.sleep(1)
                peer.h2.ping(b"12345678")
                await peer.flush()
            (connection,) = server.connections
            await connection.closed.wait()
        assert 60 <= trio.current_time() - started < 63
        await trio.testing.wait_all_tasks_blocked()
        assert (pending.budget.held, server.active_calls) == (0, 0)
    assert [each["event"] for each in logs] == ["client takes no answers: connection cut"]


async def test_a_peer_that_does_not_read_its_socket_is_cut_off(autojump_clock: MockClock) -> None:
    """Windows wide open are no sign of life: what counts is that the socket takes bytes."""
    pending = PendingAnswers()
    wide = frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 2**30}) + frames.window_update(0, 2**30)
    call = headers(1, request_headers("/test.Echo/Split")) + data(1, message(b"1000 10000"), end=True)
    async with memory_server(None, trio.testing.lockstep_stream_pair, pending) as (server, _, connect):
        raw = connect().stream
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.send_all, HELLO + wide + call)
            nursery.start_soon(raw.receive_some, 1)
        (connection,) = server.connections
        await connection.closed.wait()
        assert 60 <= trio.current_time() - started < 64
        assert pending.budget.held == 0


async def test_a_stream_that_is_not_read_is_reset_while_others_go_on(autojump_clock: MockClock) -> None:
    """Only the stream whose window stays closed is given up; an idle one and those that are read are not."""
    pending = PendingAnswers(stalled_seconds=20)
    async with memory_server(pending=pending) as (server, service, connect):
        peer = await connect().start()
        idle = await peer.request("WaitStream")
        await peer.wait_for(h2.events.DataReceived)
        await close_windows(peer)
        unread = await peer.request("Split", b"3 100")
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        while not any(isinstance(each, h2.events.StreamReset) for each in peer.events):
            read = await peer.request("Unary", b"12345")
            peer.h2.increment_flow_control_window(10, read)
            await peer.flush()
            assert (await peer.trailers(read))["grpc-status"] == "0"
            await trio.sleep(1)
            assert trio.current_time() - started < 25
        (reset,) = (each for each in peer.events if isinstance(each, h2.events.StreamReset))
        assert (reset.stream_id, reset.error_code) == (unread, ErrorCode.CANCEL)
        assert trio.current_time() - started > 18
        await trio.testing.wait_all_tasks_blocked()
        assert service.closed_generators == 1
        (connection,) = server.connections
        assert list(connection.calls) == [idle]
        assert pending.budget.held == 0


async def test_slow_readers_and_idle_streams_stay(autojump_clock: MockClock) -> None:
    """Whoever takes a byte now and then is served to the end."""
    async with memory_server(pending=PendingAnswers(stalled_seconds=10)) as (_, _, connect):
        peer = await connect().start()
        await peer.request("WaitStream")
        await peer.wait_for(h2.events.DataReceived)
        await close_windows(peer)
        slow = await peer.request("Unary", b"0123456")
        for _ in range(12):
            await trio.sleep(7)
            peer.h2.increment_flow_control_window(1, slow)
            await peer.flush()
            await trio.testing.wait_all_tasks_blocked()
        assert (await peer.trailers(slow))["grpc-status"] == "0"
        assert peer.body(slow) == message(b"0123456")


async def test_nobody_is_cut_off_where_clients_may_take_any_time(autojump_clock: MockClock) -> None:
    """With 0 a client may leave its answers for as long as its connection lives."""
    async with memory_server(pending=PendingAnswers(stalled_seconds=0)) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"read late")
        with trio.move_on_after(3_000):
            await keep_alive(peer)
        assert server.active_calls == 1


async def test_one_who_leaves_all_room_taken_is_cut_off_soon(autojump_clock: MockClock) -> None:
    """While somebody else waits for room, a client that takes nothing has seconds, not a minute."""
    pending = PendingAnswers(2_000)
    async with memory_server(pending=pending) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"x" * 1_995)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            await pending.share().wait(500)
        await trio.testing.wait_all_tasks_blocked()
        assert not server.connections


async def test_messages_of_streams_wait_while_the_share_is_full(autojump_clock: MockClock) -> None:
    """A generator is not asked for more while what it gave, here or on other streams, is not taken."""
    async with memory_server(TransportLimits(), pending=PendingAnswers(max_share_bytes=5_000)) as (
        server,
        service,
        connect,
    ):
        peer = await closed(connect())
        calls = [await peer.request("Split", b"2 2000") for _ in range(10)]
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server.connections
        assert service.produced == 10
        assert len(connection.senders) == 3
        for call in calls:
            peer.h2.increment_flow_control_window(10_000, call)
        await peer.flush()
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "0"


@pytest.mark.parametrize("count", [1, 30])
async def test_deadlines_end_answers_that_wait(autojump_clock: MockClock, count: int) -> None:
    """A call whose answer is not taken ends at its deadline, and what it held is given back."""
    pending = PendingAnswers()
    async with memory_server(pending=pending) as (_, _, connect):
        peer = await closed(connect())
        calls = [await peer.request("Unary", b"late", ("grpc-timeout", "3S")) for _ in range(count)]
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "4"
        assert pending.budget.held == 0
