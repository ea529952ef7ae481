"""The transport as grpcio's C core sees it, over real sockets."""

from __future__ import annotations

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
    return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)


async def failure(address: str, method: str, message: bytes) -> Any:
    def client() -> grpc.RpcError:
        with channel_to(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/test.Echo/{method}")(message)
            return caught.value

    return await in_thread(client)


@pytest.mark.parametrize("size", [0, 1, 100, 16_379, 16_384, 70_000, MIB + 1, 64 * MIB])
async def test_unary_messages_of_all_sizes_are_echoed(size: int) -> None:
    def client() -> bytes:
        with channel_to(address) as channel:
            return bytes(channel.unary_unary("/test.Echo/Unary")(b"u" * size))

    async with echo_server() as (_, _, address):
        assert await in_thread(client) == b"u" * size


async def test_streams_of_all_kinds_keep_order_and_half_close() -> None:
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


async def test_a_thousand_concurrent_calls_on_one_connection() -> None:
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


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(compression: grpc.Compression) -> None:
    def client() -> list[bytes]:
        with channel_to(address, compression=compression) as channel:
            echo = channel.unary_unary("/test.Echo/Unary")
            return [bytes(echo(b"z" * size)) for size in (0, 1_000, 5 * MIB)]

    async with echo_server() as (_, _, address):
        assert await in_thread(client) == [b"", b"z" * 1_000, b"z" * 5 * MIB]


@pytest.mark.parametrize(
    ("method", "message", "code", "text", "details"),
    [
        ("Fail", b"details", grpc.StatusCode.FAILED_PRECONDITION, "naïve 100% → über", b"\x00\x01details"),
        ("Fail", b"group", grpc.StatusCode.NOT_FOUND, "from a child task", None),
        ("Fail", b"bug", grpc.StatusCode.INTERNAL, "ZeroDivisionError", None),
        ("Fail", b"silent", grpc.StatusCode.INTERNAL, "no reply", None),
        ("Nothing", b"", grpc.StatusCode.UNIMPLEMENTED, "/test.Echo/Nothing", None),
        ("Unary", b"undecodable", grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no message", None),
    ],
)
async def test_failures_have_status_text_and_details(
    method: str, message: bytes, code: Any, text: str, details: bytes | None
) -> None:
    async with echo_server() as (_, _, address):
        error = await failure(address, method, message)
    assert error.code() is code
    assert text in error.details()
    assert dict(error.trailing_metadata()).get("grpc-status-details-bin") == details


@pytest.mark.parametrize(
    ("limit", "size", "texts"),
    [
        ("max_receive_message_bytes", 1_001, ("1001 bytes", "1000 bytes (max_receive_message_bytes)")),
        ("max_receive_message_bytes", 20 * MIB, ("1000 bytes (max_receive_message_bytes)",)),
        ("max_send_message_bytes", 1_001, ("1000 bytes (max_send_message_bytes)",)),
    ],
)
async def test_messages_above_a_limit_are_refused_and_the_connection_stays_usable(
    limit: str, size: int, texts: tuple[str, ...]
) -> None:
    def client() -> tuple[Any, bytes]:
        with channel_to(address) as channel:
            echo = channel.unary_unary("/test.Echo/Unary")
            with pytest.raises(grpc.RpcError) as caught:
                echo(bytes(size))
            return caught.value, echo(b"next")

    async with echo_server(TransportLimits(**{limit: 1_000})) as (_, _, address):
        error, reply = await in_thread(client)
    assert (error.code(), reply) == (grpc.StatusCode.RESOURCE_EXHAUSTED, b"next")
    assert all(text in error.details() for text in texts)


async def test_metadata_and_deadline_are_passed_both_ways() -> None:
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


async def test_no_stream_call_or_byte_remains_after_many_calls() -> None:
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
