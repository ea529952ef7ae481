from __future__ import annotations

import gc
import gzip
import weakref
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from grpclib.exceptions import GRPCError
from structlog.testing import capture_logs
from trio.testing import MockClock

from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import ErrorCode
from tests.support.bare_http2 import frame
from tests.support.waits import WAIT_SECONDS
from tests.unit.transport.grpc.bytes_client import HELLO, SMALL_LIMITS, data, headers, message, request_headers
from tests.unit.transport.grpc.peers import connected, memory_server, received_until_closed

LIMITS = SMALL_LIMITS


@pytest.mark.parametrize(
    ("method", "body", "limit", "seconds", "sent", "started"),
    [
        pytest.param("Wait", b"", "5S", 5, b"", 1, id="complete request"),
        pytest.param("Unary", None, "2000m", 2, b"", 0, id="incomplete request"),
        pytest.param("WaitStream", b"", "3S", 3, message(b"waiting"), 1, id="stream with a reply"),
        pytest.param("Wait", b"", "0n", 0, b"", 0, id="deadline in the past"),
    ],
)
async def test_a_call_ends_with_deadline_exceeded_at_its_deadline(
    autojump_clock: MockClock, method: str, body: bytes | None, limit: str, seconds: float, sent: bytes, started: int
) -> None:
    async with connected() as (peer, _, service):
        began = trio.current_time()
        call = await peer.request(method, body, ("grpc-timeout", limit), end=body is not None)
        assert (await peer.trailers(call))["grpc-status"] == "4"
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.01)
        assert (peer.body(call), len(service.started)) == (sent, started)


@pytest.mark.parametrize("kind", [b"details", b"group", b"other"])
async def test_a_failed_call_leaves_no_error_for_the_garbage_collector(kind: bytes) -> None:
    async with connected() as (peer, _, _):
        gc.collect()
        gc.disable()
        try:
            assert (await peer.trailers(await peer.request("Fail", kind)))["grpc-status"] != "0"
            await trio.testing.wait_all_tasks_blocked()
            assert [each for each in gc.get_objects() if isinstance(each, GRPCError)] == []
        finally:
            gc.enable()


async def test_a_call_reset_before_it_starts_runs_no_handler_and_logs_nothing(
    logs: list[MutableMapping[str, Any]],
) -> None:
    async with connected() as (peer, server, service):
        call = int(peer.h2.get_next_available_stream_id())
        peer.h2.send_headers(call, request_headers())
        peer.h2.send_data(call, message(b"reset"), end_stream=True)
        peer.h2.reset_stream(call, ErrorCode.CANCEL)
        assert (await peer.trailers(await peer.request("Unary", b"there")))["grpc-status"] == "0"
        assert len(service.tasks) == 1
        assert logs == []
        assert server.active_calls == 0


class _Read(bytearray):
    """Received bytes that can be referenced weakly."""


class _Received(trio.abc.ReceiveStream):
    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self.reads: list[weakref.ref[_Read]] = []

    async def receive_some(self, max_bytes: int | None = None) -> bytearray:
        data = _Read(await self._stream.receive_some(max_bytes))
        self.reads.append(weakref.ref(data))
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


async def test_received_bytes_are_released_while_calls_wait_and_while_the_connection_is_idle() -> None:
    client, server = trio.testing.memory_stream_pair()
    received = _Received(server.receive_stream)
    stapled = trio.StapledStream(server.send_stream, received)
    async with connected(make_pair=lambda: (client, stapled)) as (peer, _, service):
        assert (await peer.trailers(await peer.request("Unary")))["grpc-status"] == "0"
        await trio.testing.wait_all_tasks_blocked()
        idle = len(received.reads)
        assert [each for each in received.reads if each() is not None] == []
        await peer.request("Wait", b"w" * 1_000)
        await service.wait_started()
        assert len(received.reads) > idle
        assert [each for each in received.reads if each() is not None] == []


async def test_other_connections_are_served_while_one_floods() -> None:
    flood = b"".join(headers(number) + data(number, message(b""), end=True) for number in range(1, 2_001, 2))
    async with memory_server() as (_, service, connect):
        hostile, other = connect(), await connect().start()
        await hostile.stream.send_all(HELLO + flood)
        assert (await other.trailers(await other.request("Unary")))["grpc-status"] == "0"
        assert 0 < len(service.tasks) < 500


async def test_calls_do_not_share_context_variables() -> None:
    async with connected() as (peer, _, service):
        calls = [await peer.request("Remember", each) for each in (b"a", b"wait", b"b")]
        await service.wait_started()
        service.released.set()
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "0"
        assert [peer.body(call) for call in calls] == [
            message(b"nothing"),
            message(b"nothing, wait"),
            message(b"nothing"),
        ]


async def test_a_lost_connection_cancels_only_its_own_calls(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, service, connect):
        one, two = await connect().start(), await connect().start()
        await one.request("Wait")
        await two.request("Wait")
        await service.wait_started(2)
        await one.stream.aclose()
        await service.wait_cancelled()
        await trio.testing.wait_all_tasks_blocked()
        assert (len(server.connections), server.active_calls, len(service.cancelled_at)) == (1, 1, 1)


async def test_calls_of_a_lost_connection_end_a_few_at_a_time() -> None:
    count = 100
    async with connected() as (peer, server, service):
        for _ in range(count):
            await peer.request("Wait")
        await service.wait_started(count)
        ended = [0]
        await peer.stream.aclose()
        with trio.fail_after(WAIT_SECONDS):
            while server.active_calls:
                await trio.lowlevel.checkpoint()
                ended.append(len(service.cancelled_at))
        at_once = [after - before for before, after in pairwise(ended)]
        assert sum(at_once) == count
        assert max(at_once) < count / 2


async def test_garbage_instead_of_a_preface_ends_only_its_own_connection(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, _, connect):
        valid, invalid = await connect().start(), connect()
        call = await valid.request("Chat", b"1", end=False)
        await invalid.stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await received_until_closed(invalid.stream)
        assert answer.endswith(b"connection does not begin with the HTTP/2 preface")
        valid.h2.send_data(call, message(b"2"), end_stream=True)
        await valid.flush()
        assert (await valid.trailers(call))["grpc-status"] == "0"
        assert valid.body(call) == message(b"1") + message(b"2")
        assert len(server.connections) == 1


async def test_a_protocol_error_cancels_the_calls_of_its_connection(autojump_clock: MockClock) -> None:
    async with connected() as (peer, _, service):
        await peer.request("Wait")
        await service.wait_started()
        await peer.stream.send_all(data(0, b"?"))
        await peer.wait_closed()
        assert len(service.cancelled_at) == 1
        assert any(isinstance(e, h2.events.ConnectionTerminated) for e in peer.events)


async def test_a_silent_peer_is_disconnected_after_an_unanswered_ping(autojump_clock: MockClock) -> None:
    async with connected() as (peer, server, service):
        await peer.request("Wait")
        started = trio.current_time()
        await service.wait_cancelled()
        waited = LIMITS.keepalive_idle_seconds + LIMITS.keepalive_timeout_seconds
        assert service.cancelled_at[0] - started == pytest.approx(waited, abs=2.5)
        await trio.testing.wait_all_tasks_blocked()
        assert not server.connections


async def test_an_idle_peer_that_answers_pings_stays_connected(autojump_clock: MockClock) -> None:
    async with connected() as (peer, server, _):
        with trio.move_on_after(2_000):
            await peer.wait_closed()
        assert sum(isinstance(e, h2.events.PingReceived) for e in peer.events) > 10
        assert len(server.connections) == 1


async def test_a_connection_without_preface_ends_after_the_handshake_time(autojump_clock: MockClock) -> None:
    async with memory_server() as (_, _, connect):
        started = trio.current_time()
        peer = connect()
        await received_until_closed(peer.stream)
        assert trio.current_time() - started == pytest.approx(LIMITS.handshake_seconds, abs=1.5)


async def test_drain_serves_streams_sent_before_goaway_and_refuses_later_ones(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, service, connect), trio.open_nursery() as nursery:
        raw = connect().stream
        await raw.send_all(HELLO + headers(1, request_headers("/test.Echo/Chat")) + data(1, message(b"a")))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(server.drain, 10)
        await trio.testing.wait_all_tasks_blocked()
        answer = bytes(await raw.receive_some())
        assert frames.goaway(frames.MAX_STREAM_ID, 0) in answer
        await raw.send_all(headers(3) + data(3, message(b"late but welcome"), end=True))
        await raw.send_all(frames.ping(answer[-8:], ack=True))
        await trio.testing.wait_all_tasks_blocked()
        answer = bytes(await raw.receive_some())
        assert b"late but welcome" in answer
        assert frames.goaway(3, 0) in answer
        await raw.send_all(headers(5))
        await trio.testing.wait_all_tasks_blocked()
        assert frames.rst_stream(5, ErrorCode.REFUSED_STREAM) in await raw.receive_some()
        await raw.send_all(data(1, b"", end=True))
        answer = await received_until_closed(raw)
        await raw.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert answer.count(b"grpc-status") == 1
        assert not server.connections
        assert service.cancelled_at == []


BEGUN = headers(1, request_headers("/test.Echo/Wait", ("grpc-timeout", "5S")))
END = data(1, message(b""), end=True)


@pytest.mark.parametrize(
    ("parts", "status", "seconds"),
    [
        pytest.param([BEGUN + END], b"grpc-status\x014", 5, id="call in one part"),
        pytest.param([BEGUN, END], b"grpc-status\x014", 5, id="call in two parts"),
        pytest.param([headers(1, request_headers("/test.Echo/Nothing")) + END], b"grpc-status\x0212", 0, id="unknown"),
    ],
)
async def test_drain_serves_a_call_sent_right_after_the_ping_acknowledgement(
    autojump_clock: MockClock, parts: list[bytes], status: bytes, seconds: float
) -> None:
    async with memory_server() as (server, _, connect), trio.open_nursery() as nursery:
        raw = connect().stream
        await raw.send_all(HELLO)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        nursery.start_soon(server.drain, 10)
        await trio.testing.wait_all_tasks_blocked()
        sent = frames.ping(bytes(await raw.receive_some())[-8:], ack=True)
        for part in parts:
            await raw.send_all(sent + part)
            await trio.testing.wait_all_tasks_blocked()
            sent = b""
        answer = await received_until_closed(raw)
        await raw.aclose()
        assert frames.goaway(1, 0) in answer
        assert frames.rst_stream(1, ErrorCode.CANCEL) not in answer
        assert status in answer
        assert trio.current_time() - started == pytest.approx(seconds, abs=1)


async def test_calls_that_outlast_the_grace_of_a_drain_get_unavailable(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, service, connect):
        idle, busy = await connect().start(), await connect().start()
        call = await busy.request("WaitStream")
        await service.wait_started()
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.drain, 7)
            await idle.wait_closed()
            assert trio.current_time() == started
            assert (await busy.trailers(call))["grpc-status"] == "14"
            # Drains of several connections end a quarter of a millisecond apart, in any order.
            assert trio.current_time() - started == pytest.approx(7, abs=0.000_3)
            await busy.wait_closed()
        assert trio.current_time() - started < 8
        assert not server.connections


async def test_drain_closes_a_peer_that_ignores_it_after_the_grace(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, service, connect):
        raw = connect().stream
        await raw.send_all(HELLO + headers(1, request_headers("/test.Echo/Wait")))
        await service.wait_started()
        started = trio.current_time()
        await server.drain(3)
        assert trio.current_time() - started < 3 + 2 * LIMITS.flush_seconds
        assert not server.connections


async def test_drain_closes_the_socket_of_a_handler_that_ignores_cancellation(autojump_clock: MockClock) -> None:
    async with connected() as (peer, server, service):
        await peer.request("Stubborn")
        await service.wait_started()
        await server.drain(3)
        await peer.wait_closed()
        assert server.active_calls == 1
        service.released.set()


async def test_an_error_raised_after_the_deadline_is_reported_as_the_deadline(autojump_clock: MockClock) -> None:
    async with connected() as (peer, _, service):
        call = await peer.request("Stubborn", b"", ("grpc-timeout", "1S"))
        with trio.move_on_after(2):
            await peer.wait_closed()
        service.released.set()
        assert (await peer.trailers(call))["grpc-status"] == "4"


async def test_connections_are_closed_unread_after_a_drain(autojump_clock: MockClock) -> None:
    async with memory_server() as (server, _, _):
        await server.drain(1)
        ours, theirs = trio.testing.memory_stream_pair()
        await server.serve_stream(theirs)
        assert await ours.receive_some() == b""


async def test_a_connection_is_drained_at_its_maximum_age(autojump_clock: MockClock) -> None:
    async with connected(replace(LIMITS, max_connection_age_seconds=50)) as (peer, server, _):
        call = await peer.request("Chat", b"1", end=False)
        await peer.wait_for(h2.events.ConnectionTerminated)
        assert 50 <= trio.current_time() < 53
        peer.h2.send_data(call, message(b"2"), end_stream=True)
        await peer.flush()
        await peer.wait_closed()
        await trio.testing.wait_all_tasks_blocked()
        assert not server.connections


async def test_connections_above_the_limit_are_closed(autojump_clock: MockClock) -> None:
    async with memory_server(replace(LIMITS, max_connections=1)) as (server, _, connect):
        peer = await connect().start()
        assert await connect().stream.receive_some() == b""
        assert (await peer.trailers(await peer.request("Unary")))["grpc-status"] == "0"
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    ("method", "body", "extra", "status"),
    [
        ("Unary", b"\0\0\0", [], "3"),
        ("Unary", message(b"1") + message(b"2"), [], "12"),
        ("Unary", b"", [], "12"),
        ("Unary", b"\1" + message(b"z")[1:], [], "13"),
        ("Unary", message(b"x" * 2_000), [], "8"),
        ("Unary", message(b"x" * 2_000)[:5], [], "8"),
        ("Unary", b"\1" + message(gzip.compress(bytes(5_000), mtime=0))[1:], [("grpc-encoding", "gzip")], "8"),
        ("Unary", b"\1" + message(b"not gzip")[1:], [("grpc-encoding", "gzip")], "3"),
        ("Unary", message(b"x"), [("grpc-encoding", "snappy")], "12"),
        ("Unary", message(b"x"), [("grpc-timeout", "soon")], "3"),
        ("Join", b"\0\0\0", [], "3"),
        ("Meta", message(b""), [("x-raw-bin", "!")], "3"),
        ("Nothing", message(b""), [], "12"),
    ],
)
async def test_a_malformed_request_gets_its_status_and_the_connection_stays_usable(
    autojump_clock: MockClock, method: str, body: bytes, extra: list[tuple[str, str]], status: str
) -> None:
    async with connected(replace(LIMITS, max_receive_message_bytes=1_000)) as (peer, _, _):
        call = await peer.request(method, None, *extra, end=False)
        peer.h2.send_data(call, body, end_stream=True)
        await peer.flush()
        assert (await peer.trailers(call))["grpc-status"] == status
        assert (await peer.trailers(await peer.request("Unary")))["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("method", "extra", "status"),
    [
        ("GET", [], "405"),
        ("POST", [], "415"),
        ("POST", [("content-type", "application/json")], "415"),
        ("POST", [("content-type", "application/grpcish")], "415"),
    ],
)
async def test_requests_that_are_not_grpc_get_an_http_status(
    autojump_clock: MockClock, method: str, extra: list[tuple[str, str]], status: str
) -> None:
    async with connected() as (peer, _, _):
        pairs = [(":method", method), (":scheme", "http"), (":path", "/"), (":authority", "x"), *extra]
        peer.h2.send_headers(1, pairs, end_stream=True)
        await peer.flush()
        assert (await peer.trailers(1))[":status"] == status


async def test_a_response_waits_for_its_window_without_blocking_other_streams(autojump_clock: MockClock) -> None:
    async with connected() as (peer, _, _):
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
        await peer.flush()
        slow = await peer.request("Split", b"2 100")
        await trio.testing.wait_all_tasks_blocked()
        await peer.wait_for(h2.events.DataReceived, slow)
        assert len(peer.body(slow)) == 10
        quick = await peer.request("Split", b"1 2")
        assert (await peer.trailers(quick))["grpc-status"] == "0"
        peer.h2.increment_flow_control_window(50, slow)
        await peer.flush()
        await peer.read()
        assert len(peer.body(slow)) == 60
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1_000})
        await peer.flush()
        assert (await peer.trailers(slow))["grpc-status"] == "0"
        assert peer.body(slow) == message(b"s" * 100) * 2


async def test_messages_larger_than_all_windows_are_received_concurrently(autojump_clock: MockClock) -> None:
    async with connected() as (peer, _, _):
        size = 300_000
        calls = [await peer.request("Unary", None, end=False) for _ in range(8)]
        left = {call: message(bytes([call]) * size) for call in calls}
        while left:
            for call in list(left):
                room = min(peer.h2.local_flow_control_window(call), 16_384)
                if not room:
                    continue
                part, left[call] = left[call][:room], left[call][room:]
                peer.h2.send_data(call, part, end_stream=not left[call])
                if not left[call]:
                    del left[call]
            await peer.flush()
            await trio.testing.wait_all_tasks_blocked()
            if left and not any(peer.h2.local_flow_control_window(call) for call in left):
                await peer.read()
        for call in calls:
            peer.h2.increment_flow_control_window(size)
            peer.h2.increment_flow_control_window(size, call)
        await peer.flush()
        for call in calls:
            assert (await peer.trailers(call))["grpc-status"] == "0"
            assert peer.body(call) == message(bytes([call]) * size)


async def test_unread_request_bytes_are_bounded_by_the_stream_window(autojump_clock: MockClock) -> None:
    async with connected() as (peer, server, service):
        await trio.testing.wait_all_tasks_blocked()
        call = await peer.request("Wait", None, end=False)
        await service.wait_started()
        while room := min(peer.h2.local_flow_control_window(call), 16_384):
            peer.h2.send_data(call, bytes(room))
        await peer.flush()
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server.connections
        assert connection.core.streams[call].buffer.size == LIMITS.stream_window_bytes
        assert not any(isinstance(e, h2.events.WindowUpdated) and e.stream_id == call for e in peer.events)
        peer.h2.reset_stream(call, ErrorCode.CANCEL)
        await peer.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert (connection.core.streams, server.active_calls) == ({}, 0)


async def test_a_second_concurrent_send_on_a_call_is_an_error(autojump_clock: MockClock) -> None:
    async with connected() as (peer, server, _):
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
        await peer.flush()
        stream_id = await peer.request("Split", b"1 100")
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server.connections
        call = connection.calls[stream_id]
        with pytest.raises(trio.BusyResourceError):
            await call.send_message(b"other")
        peer.h2.increment_flow_control_window(1_000, stream_id)
        await peer.flush()
        assert (await peer.trailers(stream_id))["grpc-status"] == "0"
        assert peer.body(stream_id) == message(b"s" * 100)


async def test_data_in_flight_after_an_early_answer_is_dropped(autojump_clock: MockClock) -> None:
    async with memory_server() as (_, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO + headers(1, request_headers("/test.Echo/Nothing")))
        await trio.testing.wait_all_tasks_blocked()
        await raw.send_all(data(1, bytes(16_000)) * 3 + headers(1, [("x", "y")], end=True))
        await raw.send_all(headers(3) + data(3, message(b"next"), end=True))
        await trio.testing.wait_all_tasks_blocked()
        answer = await raw.receive_some()
        assert frames.rst_stream(1, ErrorCode.NO_ERROR) in answer
        assert message(b"next") in answer
        assert answer.count(b"grpc-status") == 2


async def test_a_peer_that_never_reads_control_frames_loses_its_connection(autojump_clock: MockClock) -> None:
    limits = replace(LIMITS, max_pings_per_second=10**9, max_write_backlog_bytes=10_000)
    async with memory_server(limits, trio.testing.lockstep_stream_pair) as (server, _, connect):
        raw = connect().stream
        await raw.send_all(HELLO)
        (connection,) = server.connections
        with suppress(trio.BrokenResourceError):
            await raw.send_all(frames.ping(bytes(8), ack=False) * 10_000)
        await connection.closed.wait()
        assert not server.connections


async def test_a_producer_stops_at_the_high_water_mark_of_an_unread_connection(autojump_clock: MockClock) -> None:
    wide = frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 2**30}) + frames.window_update(0, 2**30)
    async with memory_server(make_pair=trio.testing.lockstep_stream_pair) as (server, service, connect):
        raw = connect().stream
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.send_all, HELLO + wide + headers(1, request_headers("/test.Echo/Split")))
            nursery.start_soon(raw.receive_some, 1)
        await raw.send_all(data(1, message(b"1000 10000"), end=True))
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server.connections
        assert LIMITS.write_high_water_bytes <= connection.core.unsent_bytes < LIMITS.write_high_water_bytes + 20_000
        assert service.produced < 20
        await raw.aclose()


async def test_a_handler_bug_is_internal_to_its_caller_and_logged_with_its_traceback(
    autojump_clock: MockClock, logs: list[MutableMapping[str, Any]]
) -> None:
    async with connected() as (peer, _, _):
        waiting = await peer.request("Chat", b"1", end=False)
        call = await peer.request("Fail", b"a bug")
        trailers = await peer.trailers(call)
        assert trailers["grpc-status"] == "13"
        assert "a bug" not in trailers["grpc-message"]
        peer.h2.end_stream(waiting)
        await peer.flush()
        assert (await peer.trailers(waiting))["grpc-status"] == "0"
    (entry,) = [each for each in logs if each["log_level"] == "error"]
    assert (entry["event"], entry["path"]) == ("rpc handler failed", "/test.Echo/Fail")
    assert isinstance(entry["exc_info"], ZeroDivisionError)


async def test_repeated_protocol_faults_of_a_peer_are_logged_once_with_a_count(autojump_clock: MockClock) -> None:
    with capture_logs() as lines:
        async with memory_server() as (_, _, connect):
            for _ in range(20):
                peer = await connect().start()
                await peer.stream.send_all(frame(frames.FrameType.DATA, 0, 0, b"x"))
                await peer.wait_closed()
            await trio.sleep(61)
    faults = [line for line in lines if "fault" in line["event"]]
    assert [line["event"] for line in faults] == ["connection fault", "fault repeated"]
    assert faults[1]["times"] == 19
