from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamReset
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.remote.grpc_client import ClientCore, Exchange, ProtocolViolation, encode_literal_header

MAX_MESSAGE_BYTES = 2**31


def _header_block() -> bytes:
    pairs = ((":method", "POST"), (":scheme", "http"), (":path", "/s/M"), (":authority", "h:1"), ("te", "trailers"))
    return b"".join(encode_literal_header(name.encode(), value.encode()) for name, value in pairs)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class _Pair:
    def __init__(self) -> None:
        self.client = ClientCore()
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.server.initiate_connection()

    def to_server(self) -> list[Any]:
        data = b"".join(self.client.out)
        self.client.out = []
        return list(self.server.receive_data(data))

    def to_client(self, step: int = 2**30) -> None:
        data = self.server.data_to_send()
        for start in range(0, len(data), step):
            self.client.feed(data[start : start + step])

    def begin(self, body: bytes = b"hello") -> Exchange:
        exchange = self.client.begin(_header_block(), MAX_MESSAGE_BYTES)
        self.client.send(exchange, [body], len(body), ends=True)
        return exchange

    def round_trip(self, message: bytes, cuts: Sequence[int] = (), *, step: int = 2**30) -> Exchange:
        exchange = self.begin()
        self.to_server()
        self.answer(exchange.id, message, cuts)
        self.to_client(step)
        self.to_server()
        assert exchange.message == bytearray(message)
        return exchange

    def answer(self, stream: int, message: bytes, cuts: Sequence[int] = ()) -> None:
        self.server.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
        body = b"\0" + len(message).to_bytes(4, "big") + message
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            self.server.send_data(stream, body[start:end], pad_length=3 if start % 2 else None)
        self.server.send_headers(stream, [("grpc-status", "0")], end_stream=True)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.integers(1, 50))
def test_a_response_is_the_same_for_all_frames_and_reads(message: bytes, cuts: list[int], step: int) -> None:
    pair = _Pair()
    exchange = pair.begin()
    events = pair.to_server()
    (request,) = [event for event in events if isinstance(event, RequestReceived)]
    headers: Any = dict(request.headers)
    assert headers[":path"] == "/s/M"
    assert b"".join(event.data for event in events if isinstance(event, DataReceived)) == b"hello"
    pair.answer(exchange.id, message, sorted(min(cut, len(message) + 5) for cut in cuts))
    pair.to_client(step)
    assert exchange.ended.is_set()
    assert exchange.is_whole
    assert exchange.message == bytearray(message)
    assert exchange.headers["grpc-status"] == "0"
    assert not pair.client.exchanges


def test_settings_and_window_updates_open_windows() -> None:
    pair = _Pair()
    exchange = pair.client.begin(_header_block(), MAX_MESSAGE_BYTES)
    assert (exchange.window, pair.client.window) == (65_535, 65_535)
    pair.to_server()
    pair.server.update_settings({4: 100_000, 5: 50_000, 3: 7})
    pair.server.increment_flow_control_window(5)
    pair.server.increment_flow_control_window(3, exchange.id)
    pair.to_client()
    assert (exchange.window, pair.client.window) == (100_003, 65_540)
    assert (pair.client.frame, pair.client.most_streams) == (50_000, 7)


def test_an_abandoned_call_is_reset_once_and_its_headers_are_still_parsed() -> None:
    pair = _Pair()
    exchange = pair.begin()
    pair.to_server()
    pair.answer(exchange.id, b"late")
    pair.client.reset(exchange)
    pair.client.reset(exchange)
    assert sum(isinstance(event, StreamReset) for event in pair.to_server()) <= 1
    pair.to_client()
    pair.round_trip(b"next")


def test_goaway_ends_only_calls_that_were_not_begun() -> None:
    pair = _Pair()
    first, second = pair.begin(), pair.begin()
    pair.to_server()
    pair.client.feed(_frame(7, 0, 0, first.id.to_bytes(4, "big") + bytes(4)))
    assert not pair.client.accepts_calls
    assert second.ended.is_set()
    assert second.is_untouched
    assert not first.ended.is_set()
    pair.answer(first.id, b"complete")
    pair.to_client()
    assert first.message == bytearray(b"complete")


@pytest.mark.parametrize(("code", "untouched"), [(7, True), (2, False), (8, False)])
def test_only_refused_streams_are_untouched(code: int, *, untouched: bool) -> None:
    pair = _Pair()
    exchange = pair.begin()
    pair.client.feed(_frame(3, 0, exchange.id, code.to_bytes(4, "big")))
    assert exchange.ended.is_set()
    assert exchange.is_untouched is untouched
    assert f"code {code}" in exchange.failure


def test_a_response_above_the_limit_is_dropped_with_its_size() -> None:
    pair = _Pair()
    exchange = pair.begin()
    exchange.most = 10
    pair.to_server()
    pair.answer(exchange.id, bytes(11))
    pair.to_client()
    assert exchange.is_too_large
    assert exchange.size == 11
    assert exchange.message is None


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
        (2**20 + 1).to_bytes(3, "big") + bytes(6),
        (70_000).to_bytes(3, "big") + b"\1\0\0\0\0\1",
        b"\0\0\0\5\0\0\0\0\1",
        b"\0\0\1\1\0\0\0\0\1\x80" + b"\0\0\0\0\0\0\0\0\1",
        b"\0\0\0\x09\4\0\0\0\1",
        b"\0\0\1\1\4\0\0\0\1\xff",
        b"\0\0\3\3\0\0\0\0\1abc",
        b"\0\0\1\0\x08\0\0\0\1\xff",
    ],
)
def test_invalid_frames_end_the_connection(data: bytes) -> None:
    pair = _Pair()
    exchange = pair.begin()
    with pytest.raises(ProtocolViolation):
        pair.client.feed(data)
    pair.client.fail("broke")
    assert exchange.failure == "broke"
    assert not pair.client.accepts_calls


@given(st.binary(max_size=400))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    pair = _Pair()
    pair.begin()
    try:
        pair.client.feed(data)
    except ProtocolViolation:
        assert data
