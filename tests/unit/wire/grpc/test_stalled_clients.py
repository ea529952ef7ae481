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
from tests.unit.wire.grpc.peers import Peer, connected, memory_server

CLOSED = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}


async def close_windows(peer: Peer) -> None:
    """Set the initial window of streams to 0."""
    peer.h2.update_settings(CLOSED)
    await peer.flush()
    while sum(isinstance(each, h2.events.SettingsAcknowledged) for each in peer.events) < 2:
        await peer.read()


async def closed(peer: Peer) -> Peer:
    await peer.start()
    await close_windows(peer)
    return peer


async def answer_pings(peer: Peer) -> None:
    while await peer.read():
        pass


async def test_bytes_waiting_for_windows_are_counted_until_they_are_sent_or_the_peer_leaves(
    autojump_clock: MockClock,
) -> None:
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


async def test_a_connection_with_closed_windows_is_cut_after_a_minute_despite_its_pings(
    autojump_clock: MockClock, logs: list[MutableMapping[str, Any]]
) -> None:
    pending = PendingAnswers()
    async with memory_server(pending=pending) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"never read")
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_pings, peer)
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


async def test_a_peer_with_open_windows_that_does_not_read_its_socket_is_cut_off(autojump_clock: MockClock) -> None:
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


async def test_only_the_stalled_stream_of_a_connection_is_reset(autojump_clock: MockClock) -> None:
    pending = PendingAnswers(stalled_seconds=20)
    async with connected(pending=pending) as (peer, server, service):
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


async def test_slow_readers_and_idle_streams_are_not_cut_off(autojump_clock: MockClock) -> None:
    async with connected(pending=PendingAnswers(stalled_seconds=10)) as (peer, _, _):
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


async def test_a_stall_limit_of_0_cuts_off_no_client(autojump_clock: MockClock) -> None:
    async with memory_server(pending=PendingAnswers(stalled_seconds=0)) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"read late")
        with trio.move_on_after(3_000):
            await answer_pings(peer)
        assert server.active_calls == 1


async def test_a_stalled_client_is_cut_off_within_seconds_while_others_wait_for_room(autojump_clock: MockClock) -> None:
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
async def test_unsent_answers_end_at_their_deadline_and_release_their_bytes(
    autojump_clock: MockClock, count: int
) -> None:
    pending = PendingAnswers()
    async with memory_server(pending=pending) as (_, _, connect):
        peer = await closed(connect())
        calls = [await peer.request("Unary", b"late", ("grpc-timeout", "3S")) for _ in range(count)]
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "4"
        assert pending.budget.held == 0
