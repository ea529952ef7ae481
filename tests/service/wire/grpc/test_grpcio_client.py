"""The transport as grpcio's C core sees it, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import trio
import trio.testing

from ovmstrio.wire.grpc import TransportLimits
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.echo import echo_server

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
MIB = 1024 * 1024


@contextmanager
def channel_to(address: str, **options: Any) -> Iterator[grpc.Channel]:
    """Open a channel of its own connection."""
    with grpc.insecure_channel(address, options=[*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)], **options) as it:
        yield it


async def in_thread(function: Any, *arguments: Any) -> Any:
    """Run a blocking client."""
    return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)


@pytest.mark.parametrize("size", [0, 1, 100, 16_379, 16_384, 70_000, MIB + 1])
async def test_unary_messages_come_back_whole(size: int) -> None:
    """A unary call echoes messages of every size around the frame and window limits."""

    def client() -> bytes:
        with channel_to(address) as channel:
            return bytes(channel.unary_unary("/test.Echo/Unary")(b"u" * size))

    async with echo_server() as (_, _, address):
        assert await in_thread(client) == b"u" * size


async def test_64_mib_messages_pass_both_ways() -> None:
    """The largest message that the default limits allow is echoed."""
    size = 64 * MIB

    def client() -> bool:
        with channel_to(address) as channel:
            return bool(channel.unary_unary("/test.Echo/Unary")(b"L" * size) == b"L" * size)

    async with echo_server() as (_, _, address):
        assert await in_thread(client)


async def test_all_kinds_of_streams() -> None:
    """Response, request and bidirectional streams carry their messages in order, with half-close seen."""

    def client() -> tuple[list[int], bytes, list[bytes], list[bytes]]:
        with channel_to(address) as channel:
            split = [len(each) for each in channel.unary_stream("/test.Echo/Split")(b"5 40000")]
            join = channel.stream_unary("/test.Echo/Join")(iter([b"a", b"", b"b" * 100_000, b"c"]))
            chat = list(channel.stream_stream("/test.Echo/Chat")(iter([b"1", b"", b"3" * 70_000])))
            none = list(channel.stream_stream("/test.Echo/Chat")(iter([])))
            return split, join, chat, none

    async with echo_server() as (_, service, address):
        split, join, chat, none = await in_thread(client)
        assert split == [40_000] * 5
        assert join == b"a" + b"b" * 100_000 + b"c"
        assert chat == [b"1", b"", b"3" * 70_000]
        assert none == []
        assert service.closed_generators == 1


async def test_a_chat_answers_before_the_client_has_finished() -> None:
    """Each message of a bidirectional stream is answered before the next is sent."""

    def client() -> list[bytes]:
        answered = threading.Semaphore()

        def requests() -> Iterator[bytes]:
            for number in range(20):
                answered.acquire(timeout=WAIT_SECONDS)
                yield b"%d" % number

        replies = []
        with channel_to(address) as channel:
            for reply in channel.stream_stream("/test.Echo/Chat")(requests()):
                replies.append(reply)
                answered.release()
        return replies

    async with echo_server() as (_, _, address):
        assert await in_thread(client) == [b"%d" % number for number in range(20)]


async def test_a_thousand_concurrent_calls_on_one_connection() -> None:
    """A thousand calls are open at once on one connection, and each gets its own answer."""
    count = 1_000

    def client() -> list[bytes]:
        with channel_to(address) as channel:
            waiting = [channel.unary_unary("/test.Echo/Wait").future(b"", timeout=60) for _ in range(count)]
            trio.from_thread.run(service.wait_started, count)
            open_at_once.append((server.active_calls, len(server.connections)))
            echo = channel.unary_unary("/test.Echo/Unary")
            replies = [echo.future(b"%d" % number) for number in range(count)]
            result = [reply.result(timeout=WAIT_SECONDS) for reply in replies]
            for each in waiting:
                each.cancel()
            trio.from_thread.run(service.wait_cancelled, count)
            return result

    open_at_once: list[tuple[int, int]] = []
    async with echo_server() as (server, service, address):
        assert await in_thread(client) == [b"%d" % number for number in range(count)]
        assert open_at_once == [(count, 1)]


async def test_a_cancelled_stream_cancels_its_handler_within_100_ms() -> None:
    """RST_STREAM from the client reaches the handler of that call, and of no other."""

    def client() -> float:
        with channel_to(address) as channel:
            other = channel.unary_stream("/test.Echo/WaitStream")(b"")
            call = channel.unary_stream("/test.Echo/WaitStream")(b"")
            assert next(other) == next(call) == b"waiting"
            cancelled_at = trio.from_thread.run_sync(trio.current_time)
            call.cancel()
            trio.from_thread.run(service.wait_cancelled)
            active.append(server.active_calls)
            other.cancel()
            return float(cancelled_at)

    active: list[int] = []
    async with echo_server() as (server, service, address):
        cancelled_at = await in_thread(client)
        assert service.cancelled_at[0] - cancelled_at < 0.1
        assert active[0] >= 1


async def test_a_closed_channel_cancels_its_calls() -> None:
    """A client that goes away takes its handlers with it."""

    def client() -> None:
        with channel_to(address) as channel:
            assert next(channel.unary_stream("/test.Echo/WaitStream")(b"")) == b"waiting"

    async with echo_server() as (_, service, address):
        await in_thread(client)
        with trio.fail_after(WAIT_SECONDS):
            await service.wait_cancelled()


@pytest.mark.parametrize("method", ["Wait", "WaitStream"])
async def test_a_deadline_ends_both_sides(method: str) -> None:
    """The client sees DEADLINE_EXCEEDED, and the handler is cancelled not before that time."""

    def client() -> grpc.StatusCode:
        with channel_to(address) as channel, pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/test.Echo/{method}")(b"", timeout=2))
        return caught.value.code()

    async with echo_server() as (_, service, address):
        started = trio.current_time()
        assert await in_thread(client) is grpc.StatusCode.DEADLINE_EXCEEDED
        with trio.fail_after(WAIT_SECONDS):
            await service.wait_cancelled()
        assert service.cancelled_at[0] - started > 1


async def test_a_slow_reader_holds_its_handler_and_not_the_server() -> None:
    """A client that stops reading stops the producer after a bounded number of bytes; others go on."""
    size = 64 * 1024

    def client() -> int:
        with channel_to(address) as channel, channel_to(address) as other:
            slow = channel.unary_stream("/test.Echo/Split")(b"4000 %d" % size)
            assert len(next(slow)) == size
            for _ in range(50):
                assert other.unary_unary("/test.Echo/Unary")(b"x") == b"x"
            backlog.append(trio.from_thread.run_sync(lambda: max(c.core.waiting_bytes for c in server.connections)))
            produced = service.produced
            slow.cancel()
            return produced

    backlog: list[int] = []
    async with echo_server() as (server, service, address):
        produced = await in_thread(client)
        assert produced * size < 32 * MIB
        assert backlog[0] <= TransportLimits().write_high_water_bytes + size


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(compression: grpc.Compression) -> None:
    """A client that compresses in either way is understood; the answer is not compressed."""

    def client() -> list[bytes]:
        with channel_to(address, compression=compression) as channel:
            echo = channel.unary_unary("/test.Echo/Unary")
            return [bytes(echo(b"z" * size)) for size in (0, 1_000, 5 * MIB)]

    async with echo_server() as (_, _, address):
        assert await in_thread(client) == [b"", b"z" * 1_000, b"z" * 5 * MIB]


async def call_fails(path: str, request: bytes, limits: TransportLimits | None = None, **options: Any) -> Any:
    """Make one unary call that fails and give the client's error."""

    def client() -> grpc.RpcError:
        with channel_to(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(request)
            return caught.value

    async with echo_server(limits, **options) as (_, _, address):
        return await in_thread(client)


async def test_details_and_messages_survive_the_wire() -> None:
    """Status, percent-encoded message and binary details arrive as the handler gave them."""
    error = await call_fails("/test.Echo/Fail", b"details")
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "naïve 100% → über"
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == b"\x00\x01details"


@pytest.mark.parametrize(
    ("path", "request_bytes", "code", "text"),
    [
        ("/test.Echo/Fail", b"group", grpc.StatusCode.NOT_FOUND, "from a child task"),
        ("/test.Echo/Fail", b"bug", grpc.StatusCode.INTERNAL, "ZeroDivisionError"),
        ("/test.Echo/Fail", b"silent", grpc.StatusCode.INTERNAL, "no reply"),
        ("/test.Echo/Nothing", b"", grpc.StatusCode.UNIMPLEMENTED, "/test.Echo/Nothing"),
        ("/test.Echo/Unary", b"undecodable", grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no message"),
    ],
)
async def test_failures_have_their_status(path: str, request_bytes: bytes, code: Any, text: str) -> None:
    """Each kind of failure reaches the client as its own status with a telling message."""
    error = await call_fails(path, request_bytes)
    assert error.code() is code
    assert text in error.details()


async def test_message_limits_name_limit_and_size() -> None:
    """Messages above the limit are refused in both directions with both numbers in the text."""
    tight = TransportLimits(max_receive_message_bytes=1_000)
    error = await call_fails("/test.Echo/Unary", b"x" * 1_001, tight)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1001 bytes" in error.details()
    assert "1000 bytes (max_receive_message_bytes)" in error.details()
    error = await call_fails("/test.Echo/Unary", b"x" * 1_001, TransportLimits(max_send_message_bytes=1_000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1000 bytes (max_send_message_bytes)" in error.details()


async def test_a_refused_upload_leaves_the_connection_usable() -> None:
    """A message far above the limit is refused while it is being sent, and the next call succeeds."""

    def client() -> tuple[grpc.StatusCode, bytes]:
        with channel_to(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/test.Echo/Unary")(bytes(20 * MIB))
            error: Any = caught.value
            return error.code(), channel.unary_unary("/test.Echo/Unary")(b"next")

    async with echo_server(TransportLimits(max_receive_message_bytes=MIB)) as (_, _, address):
        assert await in_thread(client) == (grpc.StatusCode.RESOURCE_EXHAUSTED, b"next")


async def test_metadata_passes_both_ways() -> None:
    """Text and binary metadata arrive in the handler and come back in headers and trailers; the deadline is known."""
    sent = (("x-text", "value"), ("x-raw-bin", b"\x00\xff\x01"))

    def client() -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        with channel_to(address) as channel:
            reply, call = channel.unary_unary("/test.Echo/Meta").with_call(b"", metadata=sent, timeout=100)
            return reply, dict(call.initial_metadata()), dict(call.trailing_metadata())

    async with echo_server() as (_, _, address):
        reply, initial, trailing = await in_thread(client)
        assert initial == trailing == dict(sent)
        peer, remaining = reply.decode().split()
        assert peer.startswith("127.0.0.1:")
        assert 90 <= int(remaining) <= 110


async def test_the_application_translates_its_errors() -> None:
    """What ``map_error`` knows is sent as it says."""
    known = grpc.StatusCode.DATA_LOSS

    def map_error(error: Exception) -> Any:
        from grpclib.const import Status
        from grpclib.exceptions import GRPCError

        return GRPCError(Status.DATA_LOSS, f"mapped {error}") if isinstance(error, ZeroDivisionError) else None

    error = await call_fails("/test.Echo/Fail", b"odd", map_error=map_error)
    assert error.code() is known
    assert error.details() == "mapped odd"


async def test_nothing_is_left_after_many_calls() -> None:
    """After calls of every outcome no stream, call or unsent byte remains on the connection."""

    def client() -> None:
        with channel_to(address) as channel:
            for number in range(300):
                channel.unary_unary("/test.Echo/Unary")(b"x" * number)
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary("/test.Echo/Fail")(b"details")
                assert len(list(channel.unary_stream("/test.Echo/Split")(b"3 10"))) == 3
            trio.from_thread.run(trio.testing.wait_all_tasks_blocked)
            left.extend(trio.from_thread.run_sync(remains))

    def remains() -> list[int]:
        (connection,) = server.connections
        return [len(connection.core.streams), len(connection.calls), connection.core.waiting_bytes]

    left: list[int] = []
    async with echo_server() as (server, _, address):
        await in_thread(client)
    assert left == [0, 0, 0]


async def test_drain_lets_calls_finish_and_ends_the_rest() -> None:
    """Calls still running after the grace get UNAVAILABLE, and the connection is closed."""

    def client() -> grpc.StatusCode:
        with channel_to(address) as channel:
            call = channel.unary_stream("/test.Echo/WaitStream")(b"")
            assert next(call) == b"waiting"
            trio.from_thread.run(server.drain, 0.1)
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            return caught.value.code()

    async with echo_server() as (server, _, address):
        assert await in_thread(client) is grpc.StatusCode.UNAVAILABLE
        assert not server.connections
