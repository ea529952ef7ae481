from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.remote.grpc_endpoint import Exchange, RemoteConnection
from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import MAX_WINDOW, ErrorCode, FrameType, Setting
from ovmstrio.transport.grpc.headers import encode_header
from tests.support.bare_http2 import END_HEADERS, END_STREAM, frame

MAX_MESSAGE_BYTES = 2**31
SECONDS = 60.0
HEADERS = b"".join(
    encode_header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/s/M"),
        (b":authority", b"h:1"),
        (b"te", b"trailers"),
    )
)


class _Call:
    """One call of the connection and its outcome."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self.exchange: Exchange | None = None

    async def outcome(self) -> Exchange:
        with trio.fail_after(SECONDS):
            await self.ended.wait()
        assert self.exchange is not None
        return self.exchange

    async def message(self) -> bytes:
        return bytes((await self.outcome()).message or b"")


class _Pair:
    """The connection under test and a hyper-h2 server at the other end of its stream."""

    def __init__(self, connection: RemoteConnection, stream: trio.abc.Stream, nursery: trio.Nursery) -> None:
        self.connection = connection
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.server.initiate_connection()
        self._stream = stream
        self._nursery = nursery

    def begin(self, body: bytes = b"hello", most: float = MAX_MESSAGE_BYTES) -> _Call:
        call = _Call()
        self._nursery.start_soon(self._run, call, body, most)
        return call

    async def _run(self, call: _Call, body: bytes, most: float) -> None:
        with call.scope:
            call.exchange = await self.connection.call(HEADERS, [body], most)
        call.ended.set()

    async def to_server(self, until: Callable[[Any], bool]) -> list[Any]:
        events: list[Any] = []
        with trio.fail_after(SECONDS):
            while not any(map(until, events)):
                data = await self._stream.receive_some()
                assert data, "the connection ended"
                events += self.server.receive_data(bytes(data))
        return events

    async def request(self, body: bytes = b"hello", most: float = MAX_MESSAGE_BYTES) -> tuple[_Call, int]:
        """Begin a call and return it and its stream after the server has received the request."""
        call = self.begin(body, most)
        events = await self.to_server(lambda event: isinstance(event, StreamEnded))
        return call, next(event.stream_id for event in events if isinstance(event, RequestReceived))

    async def to_client(self, step: int = 2**30) -> None:
        data = self.server.data_to_send()
        for start in range(0, len(data), step):
            await self.send(data[start : start + step])

    async def apply_settings(self, settings: dict[SettingCodes | int, int]) -> None:
        """Send settings, beginning with those of the preface, and wait for the acknowledgement."""
        if settings:
            self.server.update_settings(settings)
        await self.to_client()
        await self.to_server(is_kind(SettingsAcknowledged))

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    def answer(self, stream: int, message: bytes, cuts: Sequence[int] = (), flag: bytes = b"\0") -> None:
        self.server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
        body = flag + len(message).to_bytes(4, "big") + message
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            self.server.send_data(stream, body[start:end], pad_length=3 if start % 2 else None)
        self.server.send_headers(stream, [("grpc-status", "0")], end_stream=True)

    async def round_trip(self) -> None:
        call, stream = await self.request()
        self.answer(stream, b"next")
        await self.to_client()
        assert await call.message() == b"next"


@asynccontextmanager
async def connected(*, greets: bool = True) -> AsyncIterator[_Pair]:
    client, server = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        connection = RemoteConnection(client)
        await nursery.start(connection.run)
        pair = _Pair(connection, server, nursery)
        if greets:
            await pair.apply_settings({})
        yield pair
        connection.break_off("the test has ended")


def is_kind(kind: type) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, kind)


def run(test: Callable[[_Pair], Any]) -> None:
    async def main() -> None:
        async with connected() as pair:
            await test(pair)

    trio.run(main)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.integers(1, 50))
def test_a_response_is_the_same_for_all_frames_and_reads(message: bytes, cuts: list[int], step: int) -> None:
    async def exchange(pair: _Pair) -> None:
        call = pair.begin()
        events = await pair.to_server(is_kind(StreamEnded))
        (request,) = filter(is_kind(RequestReceived), events)
        assert dict(request.headers)[":path"] == "/s/M"
        assert b"".join(event.data for event in events if isinstance(event, DataReceived)) == b"\0\0\0\0\5hello"
        pair.answer(request.stream_id, message, sorted(min(cut, len(message) + 5) for cut in cuts))
        await pair.to_client(step)
        ended = await call.outcome()
        assert not ended.failure
        assert bytes(ended.message or b"") == message
        assert ended.headers["grpc-status"] == "0"

    run(exchange)


async def test_a_large_request_waits_for_the_windows_of_the_server() -> None:
    async with connected() as pair:
        call = pair.begin(bytes(range(256)) * 1000)
        received: list[Any] = await pair.to_server(is_kind(DataReceived))
        while sum(len(event.data) for event in received if isinstance(event, DataReceived)) < 65_535:
            received += await pair.to_server(is_kind(DataReceived))
        pair.server.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 300_000})
        pair.server.increment_flow_control_window(300_000)
        await pair.to_client()
        received += await pair.to_server(is_kind(StreamEnded))
        body = b"".join(event.data for event in received if isinstance(event, DataReceived))
        assert body[5:] == bytes(range(256)) * 1000
        pair.answer(1, b"done")
        await pair.to_client()
        assert await call.message() == b"done"


async def test_calls_above_the_streams_of_the_server_wait() -> None:
    async with connected() as pair:
        await pair.round_trip()
        await pair.apply_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})
        first, stream = await pair.request()
        second = pair.begin()
        await trio.testing.wait_all_tasks_blocked()
        pair.answer(stream, b"first")
        await pair.to_client()
        assert await first.message() == b"first"
        (request,) = filter(is_kind(RequestReceived), await pair.to_server(is_kind(StreamEnded)))
        pair.answer(request.stream_id, b"second")
        await pair.to_client()
        assert await second.message() == b"second"


async def test_a_smaller_header_table_of_the_server_is_respected() -> None:
    async with connected() as pair:
        await pair.round_trip()
        await pair.apply_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
        await pair.round_trip()


async def test_an_abandoned_call_is_reset_and_its_late_response_ignored() -> None:
    async with connected() as pair:
        call, stream = await pair.request()
        pair.server.send_headers(stream, [(":status", "200"), ("x-late", "in the header table")])
        late = pair.server.data_to_send()
        call.scope.cancel()
        assert sum(map(is_kind(StreamReset), await pair.to_server(is_kind(StreamReset)))) == 1
        await pair.send(late)
        await pair.round_trip()


async def test_goaway_ends_only_calls_that_were_not_begun() -> None:
    async with connected() as pair:
        first, stream = await pair.request()
        second, _ = await pair.request()
        await pair.send(frames.goaway(stream, ErrorCode.NO_ERROR))
        unbegun = await second.outcome()
        assert unbegun.is_untouched
        assert unbegun.failure == pair.connection.refusal_reason == "the server takes no more calls on this connection"
        assert await pair.connection.call(HEADERS, [b"late"], MAX_MESSAGE_BYTES) is None
        pair.answer(stream, b"complete")
        await pair.to_client()
        assert await first.message() == b"complete"


@pytest.mark.parametrize(("code", "untouched"), [(7, True), (2, False), (8, False)])
async def test_only_refused_streams_are_untouched(code: int, *, untouched: bool) -> None:
    async with connected() as pair:
        call, stream = await pair.request()
        await pair.send(frames.rst_stream(stream, code))
        ended = await call.outcome()
        assert ended.is_untouched is untouched
        assert f"code {code}" in ended.failure


async def test_a_complete_response_remains_valid_if_the_rest_of_its_request_is_reset() -> None:
    async with connected() as pair:
        call = pair.begin(bytes(300_000))
        await pair.to_server(is_kind(DataReceived))
        pair.answer(1, b"early")
        pair.server.reset_stream(1, ErrorCode.NO_ERROR)
        await pair.to_client()
        ended = await call.outcome()
        assert (ended.failure, bytes(ended.message or b"")) == ("", b"early")


async def test_a_request_that_was_answered_early_is_reset() -> None:
    async with connected() as pair:
        call = pair.begin(bytes(300_000))
        await pair.to_server(is_kind(DataReceived))
        pair.answer(1, b"early")
        await pair.to_client()
        assert await call.message() == b"early"
        (reset,) = filter(is_kind(StreamReset), await pair.to_server(is_kind(StreamReset)))
        assert (reset.stream_id, reset.error_code) == (1, ErrorCode.CANCEL)


async def test_a_response_above_the_limit_is_dropped_with_its_size() -> None:
    async with connected() as pair:
        call, stream = await pair.request(most=10)
        pair.answer(stream, bytes(11))
        await pair.to_client()
        ended = await call.outcome()
        assert (ended.excess_bytes, ended.message) == (11, None)
        await pair.round_trip()


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"\1\0\0\0\1x", "compressed the message"),
        (b"\0\0\0\0\1x\0\0\0\0\1y", "more than one message"),
    ],
)
async def test_a_response_of_another_form_fails_only_its_call(body: bytes, failure: str) -> None:
    async with connected() as pair:
        call, stream = await pair.request()
        pair.server.send_headers(stream, [(":status", "200")])
        pair.server.send_data(stream, body)
        pair.server.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        await pair.to_client()
        ended = await call.outcome()
        assert failure in ended.failure
        await pair.round_trip()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    ],
)
async def test_a_server_that_does_not_begin_with_settings_is_refused(data: bytes, code: ErrorCode) -> None:
    async with connected(greets=False) as pair:
        call = pair.begin()
        await pair.send(data)
        assert "the server violates HTTP/2" in (await call.outcome()).failure
        (goaway,) = filter(is_kind(ConnectionTerminated), await pair.to_server(is_kind(ConnectionTerminated)))
        assert goaway.error_code == code


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ((2**20 + 1).to_bytes(3, "big") + bytes(6), ErrorCode.FRAME_SIZE_ERROR),
        ((70_000).to_bytes(3, "big") + b"\1\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, 0, 1, b"\x80") + frame(FrameType.DATA, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.CONTINUATION, END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, END_HEADERS, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 2, b"\x88"), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.DATA, END_STREAM, 9, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.RST_STREAM, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(FrameType.DATA, 8, 1, b"\xff"), ErrorCode.PROTOCOL_ERROR),
        (frames.settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW + 1}), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.settings({Setting.MAX_FRAME_SIZE: 16_383}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings({Setting.MAX_FRAME_SIZE: 2**24}), ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(0, MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    ],
)
async def test_a_protocol_violation_ends_the_connection_with_its_code(data: bytes, code: ErrorCode) -> None:
    async with connected() as pair:
        call, _ = await pair.request()
        await pair.send(data)
        assert f"the server violates HTTP/2: {code.name}" in (await call.outcome()).failure
        (goaway,) = filter(is_kind(ConnectionTerminated), await pair.to_server(is_kind(ConnectionTerminated)))
        assert (goaway.error_code, goaway.last_stream_id) == (code, 0)
        assert pair.connection.refusal_reason


async def test_a_setting_that_overflows_the_window_of_a_call_is_refused() -> None:
    async with connected() as pair:
        call = pair.begin(bytes(300_000))
        await pair.to_server(is_kind(DataReceived))
        await pair.send(frames.window_update(1, 100_000) + frames.settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}))
        assert "FLOW_CONTROL_ERROR" in (await call.outcome()).failure


@pytest.mark.parametrize(
    ("increment", "code"), [(MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR), (0, ErrorCode.PROTOCOL_ERROR)]
)
async def test_an_invalid_window_update_of_a_call_ends_only_that_call(increment: int, code: ErrorCode) -> None:
    async with connected() as pair:
        call, stream = await pair.request()
        await pair.send(frames.window_update(stream, increment))
        assert f"code {code:d}" in (await call.outcome()).failure
        (reset,) = filter(is_kind(StreamReset), await pair.to_server(is_kind(StreamReset)))
        assert reset.error_code == code
        await pair.round_trip()


@given(st.binary(max_size=400))
def test_any_bytes_leave_the_connection_usable_or_end_it(data: bytes) -> None:
    async def exchange(pair: _Pair) -> None:
        call, stream = await pair.request()
        await pair.send(data)
        await trio.testing.wait_all_tasks_blocked()
        assert pair.connection.refusal_reason or call.exchange is None or call.exchange.stream.stream_id == stream
        pair.connection.break_off("done")
        assert (await call.outcome()).failure

    run(exchange)
