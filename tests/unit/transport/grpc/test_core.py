from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from grpclib.const import Status
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import MAX_WINDOW, ConnectionFault, ErrorCode, FrameType, Setting
from ovmstrio.transport.grpc.headers import HeaderDecoder, RequestHead, trailers_block
from ovmstrio.transport.grpc.http2 import (
    DataReceived,
    Event,
    GoAwayReceived,
    PingAcknowledged,
    RequestStarted,
    ServerCore,
    StreamReset,
    WindowOpened,
)
from ovmstrio.transport.grpc.limits import TransportLimits
from tests.support.bare_http2 import END_HEADERS, END_STREAM, frame
from tests.support.examples import examples
from tests.unit.transport.grpc.bytes_client import (
    HELLO,
    SMALL_LIMITS,
    data,
    decoded,
    headers,
    message,
    receive_all,
    request_headers,
)

LIMITS = SMALL_LIMITS


def core_after(*script: bytes, limits: TransportLimits = LIMITS) -> tuple[ServerCore, list[Event]]:
    """Return a core that has received the preface and a script, with the events of the script."""
    core = ServerCore(limits, lambda: 0.0)
    core.take_outbound()
    return core, receive_all(core, HELLO + b"".join(script))


def summary(events: list[Event]) -> list[tuple[str, object]]:
    result: list[tuple[str, object]] = []
    for event in events:
        detail: object = None
        if isinstance(event, RequestStarted | DataReceived | StreamReset):
            detail = event.stream.stream_id
        elif isinstance(event, PingAcknowledged):
            detail = event.payload
        result.append((type(event).__name__, detail))
    return result


def without_windows(events: list[Event]) -> list[tuple[str, object]]:
    """Summarise events without WindowOpened, which occurs once per read."""
    return [each for each in summary(events) if each[0] != WindowOpened.__name__]


def valid_script() -> bytes:
    encoder = Encoder()
    return b"".join(
        [
            HELLO,
            frames.settings({Setting.INITIAL_WINDOW_SIZE: 100_000, Setting.MAX_FRAME_SIZE: 20_000}),
            frames.settings_ack(),
            headers(1, encoder=encoder),
            data(1, message(b"x" * 300)),
            headers(3, encoder=encoder),
            frame(FrameType.PRIORITY, 0, 3, bytes(5)),
            data(3, message(b"whole"), end=True),
            frames.window_update(0, 1_000),
            frames.window_update(1, 1_000),
            frames.ping(b"12345678", ack=False),
            frames.ping(b"abcdefgh", ack=True),
            frame(FrameType.DATA, 0x8, 1, b"\x03more" + bytes(3)),
            headers(1, [("x-end", "1")], encoder=encoder, end=True),
            headers(5, encoder=encoder),
            frames.rst_stream(5, ErrorCode.CANCEL),
            frame(77, 0xFF, 9, b"an extension"),
            frames.goaway(0, ErrorCode.NO_ERROR),
        ]
    )


@given(st.lists(st.integers(1, len(valid_script()) - 1)))
@settings(max_examples=examples(60), deadline=None)
def test_splits_of_a_session_do_not_change_its_events_and_answers(cuts: list[int]) -> None:
    script = valid_script()
    whole = ServerCore(LIMITS, lambda: 0.0)
    expected = without_windows(whole.receive(script))
    pieces = ServerCore(LIMITS, lambda: 0.0)
    events: list[Event] = []
    edges = [0, *sorted(set(cuts)), len(script)]
    for start, end in itertools.pairwise(edges):
        events += pieces.receive(script[start:end])
    assert without_windows(events) == expected
    assert pieces.outbound == whole.outbound
    assert {k: v.buffer.size for k, v in pieces.streams.items()} == {k: v.buffer.size for k, v in whole.streams.items()}
    assert [name for name, _ in expected].count("RequestStarted") == 3
    assert expected[-1] == (GoAwayReceived.__name__, None)


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_garbage_raises_nothing_but_connection_faults(garbage: bytes, after_hello: bool) -> None:
    core = ServerCore(LIMITS, lambda: 0.0)
    try:
        core.receive((HELLO if after_hello else b"") + garbage)
    except ConnectionFault as fault:
        core.fail(fault)
        assert core.outbound


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 6), st.binary(max_size=40))))
@settings(max_examples=examples(200), deadline=None)
def test_random_frames_raise_only_connection_faults_and_keep_windows_in_bounds(
    script: list[tuple[int, int, int, bytes]],
) -> None:
    core, _ = core_after(headers(1))
    try:
        for kind, flags, stream_id, payload in script:
            core.receive(frame(kind, flags, stream_id, payload))
    except ConnectionFault:
        return
    for stream in core.streams.values():
        assert core.windows.of(stream) <= MAX_WINDOW
        assert 0 <= stream.uncredited <= LIMITS.stream_window_bytes


FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "frame too large": (headers(1) + frame(FrameType.DATA, 0, 1, bytes(2**20 + 1)), ErrorCode.FRAME_SIZE_ERROR),
    "padded frame too large": (headers(1) + frame(FrameType.DATA, 8, 1, bytes(2**20 + 1)), ErrorCode.FRAME_SIZE_ERROR),
    "headers too large": (frame(FrameType.HEADERS, 4, 1, bytes(16_385)), ErrorCode.FRAME_SIZE_ERROR),
    "large frame on an idle stream": (frame(FrameType.DATA, 0, 1, bytes(20_000)), ErrorCode.PROTOCOL_ERROR),
    "large frame beyond the window": (
        headers(1) + frame(FrameType.DATA, 0, 1, bytes(66_000)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "data on idle stream": (data(7, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data on stream 0": (data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "even stream": (headers(2), ErrorCode.PROTOCOL_ERROR),
    "headers on stream 0": (headers(0), ErrorCode.PROTOCOL_ERROR),
    "push": (frame(FrameType.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "padding": (frame(FrameType.HEADERS, 0xC, 1, b"\xff"), ErrorCode.PROTOCOL_ERROR),
    "short priority": (frame(FrameType.HEADERS, 0x24, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "priority length": (frame(FrameType.PRIORITY, 0, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "priority on stream 0": (frame(FrameType.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "rst on idle stream": (frames.rst_stream(1, 0), ErrorCode.PROTOCOL_ERROR),
    "rst length": (frame(FrameType.RST_STREAM, 0, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "window update on idle stream": (frames.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
    "window update by 0": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "window update overflow": (frames.window_update(0, MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "window update length": (frame(FrameType.WINDOW_UPDATE, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "settings on a stream": (frame(FrameType.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "settings length": (frame(FrameType.SETTINGS, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "settings ack with payload": (frame(FrameType.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "settings window": (frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    "settings frame size": (frames.settings({Setting.MAX_FRAME_SIZE: 100}), ErrorCode.PROTOCOL_ERROR),
    "settings push": (frames.settings({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "ping on a stream": (frame(FrameType.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "ping length": (frame(FrameType.PING, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "goaway on a stream": (frame(FrameType.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "goaway length": (frame(FrameType.GOAWAY, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "lone continuation": (frame(FrameType.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
    "interrupted headers": (frame(FrameType.HEADERS, 0, 1) + data(1, b""), ErrorCode.PROTOCOL_ERROR),
    "continuation of another": (
        frame(FrameType.HEADERS, 0, 1) + frame(FrameType.CONTINUATION, 4, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "bad header block": (frame(FrameType.HEADERS, 4, 1, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    "older stream": (headers(5) + headers(3), ErrorCode.STREAM_CLOSED),
    "headers after the end": (headers(1, end=True) + headers(1, end=True), ErrorCode.STREAM_CLOSED),
    "connection window": (headers(1) + headers(3) + data(1, bytes(16_384)) * 20, ErrorCode.FLOW_CONTROL_ERROR),
    "endless header list": (
        frame(FrameType.HEADERS, 0, 1, bytes(16_000)) + frame(FrameType.CONTINUATION, 0, 1, bytes(16_000)) * 2,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("script", "code"), FAULTS.values(), ids=FAULTS)
def test_a_connection_error_has_the_code_of_rfc_9113(script: bytes, code: ErrorCode) -> None:
    limits = TransportLimits(connection_window_bytes=65_535, stream_window_bytes=1_000_000)
    core = ServerCore(limits, lambda: 0.0)
    with pytest.raises(ConnectionFault) as caught:
        receive_all(core, HELLO + script)
    assert caught.value.code is code


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.1", b"\x16\x03\x01", frames.PREFACE + frames.ping(bytes(8), ack=False)],
)
def test_a_connection_must_begin_with_preface_and_settings(start: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        ServerCore(LIMITS, lambda: 0.0).receive(start)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "data after the end": (headers(1, end=True) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
    "stream window": (headers(1) + data(1, bytes(16_384)) * 4, ErrorCode.FLOW_CONTROL_ERROR),
    "window overflow": (headers(1) + frames.window_update(1, MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "window by 0": (headers(1) + frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "trailers without end": (headers(1) + headers(1, [("x", "y")]), ErrorCode.PROTOCOL_ERROR),
    "trailers with path": (headers(1) + headers(1, [(":path", "/")], end=True), ErrorCode.PROTOCOL_ERROR),
    "content-length": (
        headers(1, request_headers("/x", ("content-length", "5"))) + data(1, b"four", end=True),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "upper case": (headers(1, request_headers("/x", ("X-Upper", "1"))), ErrorCode.PROTOCOL_ERROR),
    "no path": (headers(1, [(":method", "POST"), (":scheme", "http")]), ErrorCode.PROTOCOL_ERROR),
    "late pseudo-header": (headers(1, [("x", "y"), *request_headers()]), ErrorCode.PROTOCOL_ERROR),
    "connection header": (headers(1, request_headers("/x", ("connection", "close"))), ErrorCode.PROTOCOL_ERROR),
    "te": (headers(1, request_headers("/x", ("te", "gzip"))), ErrorCode.PROTOCOL_ERROR),
    "line break": (headers(1, request_headers("/x", ("x", "a\r\nb"))), ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("script", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
def test_a_stream_error_resets_only_its_stream(script: bytes, code: ErrorCode) -> None:
    core, _ = core_after(script)
    assert frames.rst_stream(1, code) in core.outbound
    assert summary(core.receive(headers(3))) == [("RequestStarted", 3)]


def test_settings_and_pings_are_acknowledged() -> None:
    core, _ = core_after(frames.ping(b"87654321", ack=False))
    assert core.outbound == frames.settings_ack() + frames.ping(b"87654321", ack=True)


def test_streams_above_the_limit_are_refused_until_one_is_released() -> None:
    core, _ = core_after(headers(1), headers(3), limits=TransportLimits(max_concurrent_streams=1))
    assert frames.rst_stream(3, ErrorCode.REFUSED_STREAM) in core.outbound
    core.receive(data(3, b"in flight", end=True))
    core.release(core.streams[1])
    assert summary(core.receive(headers(5))) == [("RequestStarted", 5)]


def test_a_new_initial_window_size_applies_to_open_streams() -> None:
    core, _ = core_after(headers(1))
    stream = core.streams[1]
    core.send_data(stream, b"", bytes(10_000))
    core.receive(frames.settings({Setting.INITIAL_WINDOW_SIZE: 4_000}))
    assert core.windows.of(stream) == -6_000
    assert core.sendable(stream) < 0
    events = core.receive(frames.settings({Setting.INITIAL_WINDOW_SIZE: 11_000}))
    assert summary(events) == [(WindowOpened.__name__, None)]
    assert core.sendable(stream) == 1_000
    with pytest.raises(ConnectionFault):
        core.receive(
            frames.window_update(1, MAX_WINDOW - 2_000) + frames.settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW})
        )


def test_a_smaller_header_table_is_announced_once_in_the_next_block() -> None:
    core, _ = core_after(frames.settings({Setting.HEADER_TABLE_SIZE: 0}), headers(1))
    core.take_outbound()
    core.send_headers(core.streams[1], b"\x88")
    core.send_headers(core.streams[1], b"\x88")
    assert core.outbound == frame(FrameType.HEADERS, 4, 1, b"\x20\x88") + frame(FrameType.HEADERS, 4, 1, b"\x88")


def test_long_header_blocks_are_sent_and_read_with_continuation_frames() -> None:
    core, _ = core_after(headers(1))
    core.take_outbound()
    core.send_headers(core.streams[1], bytes(40_000), end_stream=True)
    expected = [
        frame(FrameType.HEADERS, END_STREAM, 1, bytes(16_384)),
        frame(FrameType.CONTINUATION, 0, 1, bytes(16_384)),
        frame(FrameType.CONTINUATION, END_HEADERS, 1, bytes(40_000 - 2 * 16_384)),
    ]
    assert core.outbound == b"".join(expected)
    block = Encoder().encode(request_headers())
    script = frame(FrameType.HEADERS, END_STREAM, 3, block[:10]) + frame(FrameType.CONTINUATION, 0, 3, block[10:20])
    assert summary(core.receive(script)) == []
    assert [name for name, _ in summary(core.receive(frame(FrameType.CONTINUATION, 4, 3, block[20:])))] == [
        "RequestStarted",
        "DataReceived",
    ]


def test_a_window_opens_when_half_of_it_is_consumed() -> None:
    core, _ = core_after(headers(1), data(1, bytes(16_384)), data(1, bytes(16_384)))
    core.take_outbound()
    stream = core.streams[1]
    core.consume(stream, 16_384)
    assert not core.outbound
    core.consume(stream, 16_384)
    assert core.outbound == frames.window_update(1, 32_768)
    assert stream.uncredited == 0


def test_unread_and_late_data_of_a_released_stream_is_credited_to_the_connection() -> None:
    core, _ = core_after(headers(1), data(1, bytes(16_384)) * 3)
    core.take_outbound()
    core.release(core.streams[1])
    assert not core.streams
    core.receive(data(1, bytes(16_384)) * 9)
    assert frames.window_update(0, 16_384 * 8) in core.outbound
    assert core.outbound.startswith(frames.rst_stream(1, ErrorCode.CANCEL))


def _many(make: Callable[[int], bytes]) -> bytes:
    return b"".join(make(number) for number in range(200))


FLOODS: dict[str, bytes] = {
    "resets": _many(lambda n: headers(2 * n + 1) + frames.rst_stream(2 * n + 1, ErrorCode.CANCEL)),
    "resets by the server": _many(lambda n: headers(2 * n + 1) + frames.window_update(2 * n + 1, 0)),
    "malformed requests": _many(lambda n: headers(2 * n + 1, [(":method", "POST")])),
    "pings": _many(lambda _: frames.ping(bytes(8), ack=False)),
    "settings": _many(lambda _: frames.settings({})),
    "priorities": _many(lambda _: frame(FrameType.PRIORITY, 0, 1, bytes(5))),
    "empty data": headers(1) + _many(lambda _: data(1, b"")),
    "unknown frames": _many(lambda _: frame(200, 0, 0, b"")),
    "continuations": frame(FrameType.HEADERS, 0, 1) + _many(lambda _: frame(FrameType.CONTINUATION, 0, 1)),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_floods_are_answered_with_enhance_your_calm(flood: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        core_after(flood)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_rate_limits_count_frames_per_second() -> None:
    now = [0.0]
    core = ServerCore(LIMITS, lambda: now[0])
    core.receive(HELLO)
    for _ in range(200):
        now[0] += 0.1
        core.receive(frames.ping(bytes(8), ack=False))
    assert core.outbound.count(frames.ping(bytes(8), ack=True)) == 200


def test_one_ping_per_sent_message_is_not_a_flood() -> None:
    core, _ = core_after(headers(1))
    for _ in range(200):
        core.send_data(core.streams[1], b"\0\0\0\0\1", b"x")
        core.receive(frames.ping(bytes(8), ack=False))
    assert core.outbound.count(frames.ping(bytes(8), ack=True)) == 200


def test_requests_of_one_read_are_started_in_several_turns() -> None:
    pairs = request_headers("/test.Echo/Unary")
    script = b"".join(headers(n, pairs) + data(n, message(b"x"), end=True) for n in range(1, 201, 2))
    core = ServerCore(TransportLimits(), lambda: 0.0)
    turns = [core.receive(HELLO + script)]
    while core.more:
        turns.append(core.go_on())
    begun = [sum(isinstance(event, RequestStarted) for event in turn) for turn in turns]
    assert sum(begun) == 100
    assert max(begun) <= 16


LARGE_SIZES = [8_191, 8_192, 16_385, 100_000, 2**20]
ROOMY = TransportLimits(stream_window_bytes=2**22, connection_window_bytes=2**24)


def _large_script() -> tuple[bytes, bytes]:
    contents = [bytes([number]) * size for number, size in enumerate(LARGE_SIZES)]
    frames_of_data = [data(1, content) for content in contents]
    padded = frame(FrameType.DATA, 8, 1, b"\x05" + b"p" * 50_000 + bytes(5))
    others = [data(3, b"o" * 20_000), frames.ping(bytes(8), ack=False), headers(5)]
    body = b"".join([*contents, b"p" * 50_000, b"end"])
    first = data(1, message(body)[:5])
    script = [HELLO, headers(1), headers(3), first, *frames_of_data, padded, *others, data(1, b"end", end=True)]
    return b"".join(script), body


@given(st.lists(st.integers(1, 1_400_000), max_size=30), st.sampled_from([1_000_000, 65_536, 10_007]))
@settings(max_examples=examples(40), deadline=None)
def test_large_frames_are_passed_on_as_they_arrive_however_they_are_split(cuts: list[int], longest: int) -> None:
    script, expected = _large_script()
    core = ServerCore(ROOMY, lambda: 0.0)
    edges = sorted({0, *range(0, len(script), longest), *(cut for cut in cuts if cut < len(script)), len(script)})
    for start, end in itertools.pairwise(edges):
        receive_all(core, script[start:end])
        # Only a padded frame waits for its end; headers of frames and the third stream's data take the rest.
        credited = sum(each.uncredited for each in core.streams.values())
        assert end - credited < 50_020 + 1_000
    stream = core.streams[1]
    assert stream.is_remote_closed
    assert stream.uncredited == 5 + len(expected)
    assert stream.buffer.take(2**24) == (0, expected)
    assert set(core.streams) == {1, 3, 5}


def test_large_payloads_are_sent_without_a_copy() -> None:
    core = ServerCore(ROOMY, lambda: 0.0)
    peer_settings = {Setting.MAX_FRAME_SIZE: 2**24 - 1, Setting.INITIAL_WINDOW_SIZE: 2**24}
    receive_all(
        core, frames.PREFACE + frames.settings(peer_settings) + frames.window_update(0, 2**24) + headers(1, end=True)
    )
    core.take_outbound()
    stream = core.streams[1]
    message = bytes(300_000)
    assert core.sendable(stream) == 2**18
    core.send_data(stream, b"head", memoryview(message)[:200_000])
    core.send_data(stream, b"", b"small")
    assert core.unsent_bytes == 9 + 4 + 200_000 + 9 + 5
    sent = core.take_outbound()
    assert b"".join(sent) == frame(FrameType.DATA, 0, 1, b"head" + message[:200_000]) + frame(
        FrameType.DATA, 0, 1, b"small"
    )
    assert any(isinstance(each, memoryview) and each.obj is message for each in sent)
    assert core.unsent_bytes == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrent_streams": 0},
        {"max_receive_message_bytes": -1},
        {"stream_window_bytes": 65_534},
        {"connection_window_bytes": 2**31},
        {"keepalive_idle_seconds": -1.0},
        {"handshake_seconds": float("nan")},
    ],
)
def test_impossible_limits_are_refused_by_name(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"^{name}: expected at"):
        TransportLimits(**bad)


def head_of(*extra: tuple[str, str], limit: int = 16_384) -> RequestHead:
    head = HeaderDecoder(limit).request(Encoder().encode(request_headers("/a/B", *extra)))
    assert isinstance(head, RequestHead)
    return head


def refusal_of(head: RequestHead) -> dict[str, str]:
    assert head.refusal is not None
    return dict(decoded(head.refusal))


def test_path_timeout_encoding_and_length_are_read() -> None:
    plain = head_of()
    assert (plain.path, plain.timeout_seconds, plain.encoding, plain.content_length) == (
        "/a/B",
        math.inf,
        "identity",
        None,
    )
    head = head_of(("grpc-timeout", "1500m"), ("grpc-encoding", "gzip"), ("content-length", "7"))
    assert (head.timeout_seconds, head.encoding, head.content_length, head.refusal) == (1.5, "gzip", 7, None)


def test_decoded_blocks_are_forgotten_when_the_table_changes() -> None:
    decoder = HeaderDecoder(16_384)
    post_http, newest_entry = b"\x83\x86", b"\xbe"
    paths = []
    for path in (b"/a", b"/b"):
        decoder.request(post_http + b"\x44\x02" + path)  # a literal :path that enters the table
        for _ in range(2):
            head = decoder.request(post_http + newest_entry)
            assert isinstance(head, RequestHead)
            paths.append(head.path)
    assert paths == ["/a", "/a", "/b", "/b"]


def test_blocks_that_change_the_table_are_decoded_each_time() -> None:
    decoder = HeaderDecoder(16_384)
    block = Encoder().encode(request_headers())
    assert decoder.request(block) is not decoder.request(block)


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_subtypes_and_parameters_of_the_grpc_content_type_are_accepted(content_type: str) -> None:
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", "/a/B"), ("content-type", content_type)]
    head = HeaderDecoder(16_384).request(Encoder().encode(pairs))
    assert isinstance(head, RequestHead)
    assert head.refusal is None


@pytest.mark.parametrize("timeout", ["", "5", "S", "-1S", "1.5S", "123456789S", "99999999999S", "5 S", "٣S"])
def test_bad_timeouts_are_invalid_arguments(timeout: str) -> None:
    answer = refusal_of(head_of(("grpc-timeout", timeout)))
    assert answer["grpc-status"] == str(Status.INVALID_ARGUMENT.value)
    assert "grpc-timeout" in answer["grpc-message"]


def test_header_lists_above_the_limit_are_refused_with_both_sizes() -> None:
    answer = refusal_of(head_of(("x-long", "v" * 2_000), limit=1_000))
    assert answer["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
    assert "limit of 1000 bytes (max_header_list_bytes)" in answer["grpc-message"]
    with pytest.raises(ConnectionFault):
        head_of(("x-long", "v" * 5_000), limit=1_000)


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 5_000, "ab" + "é" * 5_000, "a" + "é" * 5_000, "\ud800" * 9_000])
def test_long_status_messages_are_cut_outside_of_escapes(text: str) -> None:
    message = dict(decoded(trailers_block(Status.INTERNAL, text)))["grpc-message"]
    assert 4_000 < len(message) <= 4_096
    assert len(message.rsplit("%", 1)[-1]) >= 2
