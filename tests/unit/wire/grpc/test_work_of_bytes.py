"""The work that bytes of a peer cause: at most linear in their number, and the same however many streams are open.

Work is counted in lines of Python that run, which is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType as PythonFrame
from typing import Any

import pytest
import trio
import trio.testing
from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ovmstrio.wire.grpc import TransportLimits, frames
from ovmstrio.wire.grpc.core import Http2Core
from ovmstrio.wire.grpc.frames import MAX_WINDOW, ConnectionFault, ErrorCode, FrameType, Setting
from tests.support.bare_http2 import frame
from tests.support.examples import examples
from tests.unit.wire.grpc.bytes_client import HELLO, data, headers, message, receive_all, request_headers
from tests.unit.wire.grpc.peers import memory_server

FEW, MANY = 3, 300
LIMITS = TransportLimits(max_concurrent_streams=2_048)
LINES_A_BYTE = 60
"""A header field may be one byte, and reading one takes so many lines of the HPACK library."""
LINES_ANYWAY = 600
LINES_A_FRAME = 100


class Lines:
    """Counts lines that run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: PythonFrame, event: str, _value: Any) -> Lines:
        """Count one, as a trace function."""
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


def core_with(streams: int) -> Http2Core:
    """Create a core with open streams whose windows are used up and whose answers wait."""
    core, encoder = Http2Core(LIMITS, lambda: 0.0), Encoder()
    opened = b"".join(headers(number, encoder=encoder) for number in range(1, 2 * streams, 2))
    receive_all(core, HELLO + frames.window_update(0, 2**30) + opened)
    for stream in core.streams.values():
        for _ in range(4):
            core.send_data(stream, b"", bytes(core.sendable(stream)))
        stream.is_starved = True
    core.take_outbound()
    return core


def lines_of(core: Http2Core, script: bytes) -> int:
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
    """Counts how often tasks run, and the most lines that one of those turns took."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a turn."""
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
