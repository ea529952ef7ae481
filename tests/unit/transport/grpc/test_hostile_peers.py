from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType as PythonFrame
from typing import Any

import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import MAX_WINDOW, ConnectionFault, ErrorCode, FrameType, Setting
from ovmstrio.transport.grpc.http2 import ServerCore
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.send_budget import SendBudget
from tests.support.bare_http2 import frame
from tests.support.examples import examples
from tests.unit.transport.grpc.bytes_client import HELLO, data, headers, message, receive_all, request_headers
from tests.unit.transport.grpc.peers import Peer, connected, memory_server

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
    pending = SendBudget()
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
    pending = SendBudget()
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
    assert [each["event"] for each in logs] == ["stalled connection closed"]


async def test_a_peer_with_open_windows_that_does_not_read_its_socket_is_cut_off(autojump_clock: MockClock) -> None:
    pending = SendBudget()
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
    pending = SendBudget(stalled_seconds=20)
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
    async with connected(pending=SendBudget(stalled_seconds=10)) as (peer, _, _):
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
    async with memory_server(pending=SendBudget(stalled_seconds=0)) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"read late")
        with trio.move_on_after(3_000):
            await answer_pings(peer)
        assert server.active_calls == 1


async def test_a_stalled_client_is_cut_off_within_seconds_while_others_wait_for_room(autojump_clock: MockClock) -> None:
    pending = SendBudget(2_000)
    async with memory_server(pending=pending) as (server, _, connect):
        peer = await closed(connect())
        await peer.request("Unary", b"x" * 1_995)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            await pending.share().wait(500)
        await trio.testing.wait_all_tasks_blocked()
        assert not server.connections


async def test_messages_of_streams_wait_while_the_share_is_full(autojump_clock: MockClock) -> None:
    async with memory_server(TransportLimits(), pending=SendBudget(max_share_bytes=5_000)) as (
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
    pending = SendBudget()
    async with memory_server(pending=pending) as (_, _, connect):
        peer = await closed(connect())
        calls = [await peer.request("Unary", b"late", ("grpc-timeout", "3S")) for _ in range(count)]
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "4"
        assert pending.budget.held == 0


FEW, MANY = 3, 300
LIMITS = TransportLimits(max_concurrent_streams=2_048)
LINES_A_BYTE = 60
"""A header field may be one byte, and reading one takes so many lines of the HPACK library."""
LINES_ANYWAY = 600
LINES_A_FRAME = 100


class Lines:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: PythonFrame, event: str, _value: Any) -> Lines:
        self.count += event == "line"
        return self


@contextmanager
def counted_lines() -> Iterator[Lines]:
    lines, before = Lines(), sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    finally:
        sys.settrace(before)


def core_with(streams: int) -> ServerCore:
    """Create a core with open streams whose windows are used up and whose answers wait."""
    core, encoder = ServerCore(LIMITS, lambda: 0.0), Encoder()
    opened = b"".join(headers(number, encoder=encoder) for number in range(1, 2 * streams, 2))
    receive_all(core, HELLO + frames.window_update(0, 2**30) + opened)
    for stream in core.streams.values():
        for _ in range(4):
            core.send_data(stream, b"", bytes(core.sendable(stream)))
        stream.is_starved = True
    core.take_outbound()
    return core


def lines_of(core: ServerCore, script: bytes) -> int:
    with counted_lines() as lines:
        try:
            receive_all(core, script)
        except ConnectionFault as fault:
            core.fail(fault)
    return lines.count


STREAM = st.sampled_from([0, 1, 3, 5, 2 * MANY + 1, 2 * MANY + 3])
VALUE = st.sampled_from([0, 1, 100, 65_535, 100_000, 2**30, MAX_WINDOW - 100, MAX_WINDOW])
BLOCK = st.one_of(
    st.just(headers(1)[9:]),
    st.just(headers(1, [("x-trailer", "1")])[9:]),
    st.lists(st.sampled_from([b"\x82", b"\x84", b"\xbe", b"\x20", b"\x40\1a\1b", b"\0\1a\1b"]), max_size=300).map(
        b"".join
    ),
    st.binary(max_size=60),
)


def _windows(values: list[int]) -> bytes:
    return frame(FrameType.SETTINGS, 0, 0, b"".join(b"\0\4" + value.to_bytes(4) for value in values))


FRAME = st.one_of(
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), STREAM, st.binary(max_size=30)),
    st.builds(frames.window_update, STREAM, VALUE),
    st.builds(_windows, st.lists(VALUE, max_size=30)),
    st.builds(frame, st.just(FrameType.DATA), st.sampled_from([0, 1, 8]), STREAM, st.binary(max_size=3)),
    st.builds(frames.rst_stream, STREAM, st.just(ErrorCode.CANCEL)),
    st.builds(lambda ack: frames.ping(bytes(8), ack=ack), st.booleans()),
    st.builds(frame, st.just(FrameType.HEADERS), st.sampled_from([0, 1, 4, 5]), STREAM, BLOCK),
    st.builds(frame, st.just(FrameType.CONTINUATION), st.sampled_from([0, 4]), STREAM, BLOCK),
)
SCRIPT = st.lists(st.tuples(FRAME, st.integers(1, 40)), min_size=1, max_size=12).map(
    lambda script: b"".join(each * times for each, times in script)
)


@given(SCRIPT)
@example(frames.settings({Setting.INITIAL_WINDOW_SIZE: 70_000}))
@example(frame(FrameType.SETTINGS, 0, 0, (b"\0\4" + (70_000).to_bytes(4)) * 90))
@example(frames.window_update(0, 1) * 400)
@example(frames.window_update(1, 1) * 400)
@example(
    frames.window_update(1, 2**30) + frames.rst_stream(1, 8) + frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**30})
)
@example(frame(FrameType.HEADERS, 4, 2 * MANY + 1, b"\x20" * 16_000))
@settings(max_examples=examples(120), deadline=None)
def test_the_cost_of_frames_is_linear_and_independent_of_open_streams(script: bytes) -> None:
    few, many = lines_of(core_with(FEW), script), lines_of(core_with(MANY), script)
    assert many <= LINES_A_BYTE * len(script) + LINES_ANYWAY
    assert abs(many - few) <= LINES_A_FRAME


def test_entries_of_a_settings_frame_count_towards_the_settings_limit() -> None:
    core = core_with(2_000)
    entries = b"".join(b"\0\4" + value.to_bytes(4) for value in range(65_536, 65_536 + 2_730))
    script = frame(FrameType.SETTINGS, 0, 0, entries) * 20
    assert lines_of(core, script) < 200
    assert core.outbound.endswith(b"too_many_settings")


def test_only_the_last_window_of_a_settings_frame_is_applied_and_all_are_checked() -> None:
    core = core_with(1)
    entries = [b"\0\4" + value.to_bytes(4) for value in (2**30, 65_535)]
    assert receive_all(core, frame(FrameType.SETTINGS, 0, 0, b"".join(entries))) == []
    assert core.windows.of(core.streams[1]) == 0
    with pytest.raises(ConnectionFault) as caught:
        receive_all(core, frame(FrameType.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff" + entries[1]))
    assert caught.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_a_flood_of_window_updates_is_cut_off() -> None:
    core = core_with(2_000)
    script = frames.window_update(0, 1) * 40_000
    assert lines_of(core, script) < 40 * LIMITS.max_window_updates_per_second
    assert core.outbound.endswith(b"too_many_window_updates")


def test_window_updates_that_follow_messages_are_no_flood() -> None:
    core = core_with(1)
    stream = core.streams[1]
    receive_all(core, frames.window_update(1, 2**20))
    for _ in range(2 * LIMITS.max_window_updates_per_second):
        core.send_data(stream, b"\0\0\0\0\1", b"x")
        receive_all(core, frames.window_update(0, 6) + frames.window_update(1, 6))
    assert not core.outbound.endswith(b"too_many_window_updates")


def test_a_header_block_begins_with_at_most_two_table_updates() -> None:
    core = core_with(1)
    block = headers(3)[9:]
    receive_all(core, frame(FrameType.HEADERS, 4, 3, b"\x20\x3f\xe1\x1f" + block))
    assert 3 in core.streams
    with pytest.raises(ConnectionFault) as caught:
        receive_all(core, frame(FrameType.HEADERS, 4, 5, b"\x20" * 3 + block))
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


UNLIMITED_UPDATES = TransportLimits(max_window_updates_per_second=10**6)


def unary_calls(count: int, body: bytes) -> bytes:
    pairs = request_headers("/test.Echo/Unary")
    numbers = range(1, 2 * count, 2)
    return b"".join(headers(number, pairs) + data(number, message(body), end=True) for number in numbers)


class Turns(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self.count += 1


async def test_window_updates_do_not_wake_streams_that_cannot_send(autojump_clock: trio.testing.MockClock) -> None:
    closed = frames.settings({Setting.INITIAL_WINDOW_SIZE: 0})
    async with memory_server(UNLIMITED_UPDATES) as (server, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO + closed + unary_calls(300, b"x" * 10))
        await trio.testing.wait_all_tasks_blocked()
        assert server.active_calls == 300
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await raw.send_all(frames.window_update(0, 1) * 20_000)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(turns)
        assert turns.count < 200
        (connection,) = server.connections
        assert connection.core.windows.connection == 65_535 + 20_000


async def test_a_small_connection_window_wakes_only_as_many_streams_as_it_serves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    size, count = 1_000, 300
    async with memory_server(UNLIMITED_UPDATES) as (server, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO + unary_calls(count, b"x" * size))
        await trio.testing.wait_all_tasks_blocked()
        waiting = server.active_calls
        assert waiting == count - 65_535 // (size + 5)
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        for _ in range(10):
            await raw.send_all(frames.window_update(0, 1))
            await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(turns)
        assert turns.count < 10 * 12
        await raw.send_all(frames.window_update(0, 2**20))
        await trio.testing.wait_all_tasks_blocked()
        assert server.active_calls == 0


async def test_a_larger_initial_window_lets_every_waiting_stream_send(autojump_clock: trio.testing.MockClock) -> None:
    closed = frames.settings({Setting.INITIAL_WINDOW_SIZE: 0})
    async with memory_server(TransportLimits()) as (server, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO + closed + unary_calls(20, b"answer") + frames.window_update(3, 4))
        await trio.testing.wait_all_tasks_blocked()
        assert server.active_calls == 20
        await raw.send_all(frames.settings({Setting.INITIAL_WINDOW_SIZE: 7}))
        await trio.testing.wait_all_tasks_blocked()
        assert server.active_calls == 19
        await raw.send_all(frames.settings({Setting.INITIAL_WINDOW_SIZE: 11}))
        await trio.testing.wait_all_tasks_blocked()
        assert server.active_calls == 0
        assert bytes(await raw.receive_some(100_000)).count(b"grpc-status") == 20


async def test_other_tasks_run_between_the_frames_of_a_long_read(autojump_clock: trio.testing.MockClock) -> None:
    async with memory_server(UNLIMITED_UPDATES) as (_, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO)
        await trio.testing.wait_all_tasks_blocked()
        turns = 0
        async with trio.open_nursery() as nursery:

            async def neighbour() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            nursery.start_soon(neighbour)
            for _ in range(8):
                await raw.send_all(frames.window_update(0, 1) * 5_000)
            before = turns
            for _ in range(60):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert turns - before > 30
