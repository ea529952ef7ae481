from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import trio
import trio.testing
import trustme
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.transport.grpc.call import Call, ReusableScope
from ovmstrio.transport.grpc.connection import Connection
from ovmstrio.transport.grpc.frames import ErrorCode, FrameType
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.listeners import PlainListener, open_listeners, tls_context
from tests.support.bare_http2 import BareConnection, frame, framed
from tests.support.waits import WAIT_SECONDS
from tests.unit.transport.grpc.bytes_client import SMALL_LIMITS
from tests.unit.transport.grpc.echo import Echo, echo_server, serving

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
MIB = 1024 * 1024


@contextmanager
def channel_to(address: str, **options: Any) -> Iterator[grpc.Channel]:
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
        assert initial.pop("x-request-id")
        assert initial == trailing == dict(sent)
        peer, remaining = reply.decode().split()
        assert peer.startswith("127.0.0.1:")
        assert 90 <= int(remaining) <= 110


_UNARY: Final = "/test.Echo/Unary"
_WAIT: Final = "/test.Echo/Wait"
_CANCEL: Final = ErrorCode.CANCEL.to_bytes(4, "big")
_LARGE: Final = bytes(200_000)


async def _client(work: Callable[[int], None], address: str) -> None:
    with trio.fail_after(WAIT_SECONDS):
        await trio.to_thread.run_sync(work, int(address.rpartition(":")[2]), abandon_on_cancel=True)


def _begin(peer: BareConnection, messages: list[bytes], path: str = _UNARY, *further: tuple[str, str]) -> list[int]:
    begun = [peer.begin(path, framed(each), further) for each in messages]
    peer.send(b"".join(data for _, data in begun))
    return [stream for stream, _ in begun]


async def test_a_client_that_reads_late_gets_every_answer_and_others_do_not_wait() -> None:
    def work(port: int) -> None:
        with BareConnection(port, receive_buffer=4_096) as peer, BareConnection(port) as other:
            streams = _begin(peer, [_LARGE] * 30)
            assert other.ask(_UNARY, b"meanwhile").message == b"meanwhile"
            (waits,) = _begin(peer, [b""], _WAIT)
            peer.send(frame(FrameType.RST_STREAM, 0, waits, _CANCEL))
            streams += _begin(peer, [b"small"] * 3)
            assert other.ask(_UNARY, b"again").message == b"again"
            answers = [peer.wait(stream) for stream in streams]
            assert [each.message for each in answers] == [_LARGE] * 30 + [b"small"] * 3
            assert {each.status for each in answers} == {"0"}

    async with echo_server() as (server, _, address):
        await _client(work, address)
        assert server.active_calls == 0


_TOO_LATE: Final = str(Status.DEADLINE_EXCEEDED.value)


async def test_a_scope_that_was_not_kept_is_lent_again_without_its_deadline() -> None:
    with ReusableScope() as lent:
        first = lent.lend(trio.current_time() + 1)
        assert not lent.take_back(None)
        assert lent.lend(math.inf) is first
        assert first.deadline == math.inf
        await trio.lowlevel.checkpoint()


class _Service:
    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Lent/Ask": Handler(self._ask, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _ask(self, call: Call) -> None:
        message = await call.recv_message()
        if message == b"cancel":
            call.cancel()
        if message == b"wait":
            await trio.sleep_forever()
        await call.send_message(message)


async def test_cancellation_and_deadline_of_a_call_do_not_affect_others_of_the_same_read() -> None:
    def work(port: int) -> None:
        with BareConnection(port) as peer:
            messages = [b"one", b"cancel", b"two", b"wait", b"three"]
            late = (("grpc-timeout", "50m"),)
            begun = [peer.begin("/test.Lent/Ask", framed(each), late if each == b"wait" else ()) for each in messages]
            peer.send(b"".join(data for _, data in begun))
            answers = [peer.wait(stream) for stream, _ in begun]
            assert [each.status for each in answers] == ["0", "0", "0", _TOO_LATE, "0"]
            assert [each.message for each in answers if each.status == "0"] == [b"one", b"cancel", b"two", b"three"]
            assert peer.ask("/test.Lent/Ask", b"after").message == b"after"

    async with serving(_Service()) as (server, address):
        await _client(work, address)
        assert server.active_calls == 0


class Keys:
    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca, self.server, self.client = (folder / name for name in ("ca.pem", "server.pem", "client.pem"))
        authority.cert_pem.write_to_path(str(self.ca))
        for path, name in ((self.server, "127.0.0.1"), (self.client, "client@example.org")):
            authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def call(channel: grpc.Channel, method: str = "Unary", request: bytes = b"hello") -> bytes:
    with channel:
        return bytes(channel.unary_unary(f"/test.Echo/{method}")(request, timeout=WAIT_SECONDS))


def credentials(keys: Keys, *, with_client: bool = False) -> grpc.ChannelCredentials:
    client = keys.client.read_bytes() if with_client else None
    return grpc.ssl_channel_credentials(keys.ca.read_bytes(), client, client)


async def test_mutual_tls_requires_a_client_certificate(keys: Keys) -> None:
    async with echo_server(tls=tls_context(keys.server, keys.server, keys.ca)) as (server, _, address):

        def stranger() -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as caught:
                call(grpc.secure_channel(address, credentials(keys)))
            error: Any = caught.value
            return error.code()

        def known() -> bytes:
            return call(grpc.secure_channel(address, credentials(keys, with_client=True)), "Meta")

        assert await trio.to_thread.run_sync(stranger) is grpc.StatusCode.UNAVAILABLE
        assert (await trio.to_thread.run_sync(known)).startswith(b"127.0.0.1:")
        assert len(server.connections) <= 1


class _NumberedStream(Echo):
    """Sends numbered messages on a stream one by one, when the connection has nothing else to do."""

    async def _call_rpc_handler_server_stream(self, handler: Any, stream: Any, request: Any) -> None:
        for number in range(int(request)):
            await trio.testing.wait_all_tasks_blocked()
            await stream.send_message(b"%06d" % number * 2_000, has_more=False)


async def test_lone_messages_are_written_at_once_and_in_order_though_the_socket_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, full = [], trio.Event()
    write_alone = Connection.write_alone

    def observed(connection: Connection) -> bool:
        written.append(write_alone(connection))
        if written[-1] and connection.core.unsent_bytes:
            full.set()
        return written[-1]

    monkeypatch.setattr(Connection, "write_alone", observed)
    async with serving(_NumberedStream()) as (_, address):
        with BareConnection(int(address.rpartition(":")[2]), receive_buffer=4_096) as peer:
            stream, call_bytes = peer.begin("/test.Echo/Split", framed(b"1000"))
            peer.send(call_bytes)
            with trio.fail_after(WAIT_SECONDS):
                await full.wait()
                answer = await in_thread(peer.wait, stream)
    assert written[0]
    assert answer.status == "0"
    assert answer.data == b"".join(framed(b"%06d" % number * 2_000) for number in range(1000))


async def test_clients_without_tls_or_without_h2_are_closed_and_others_are_served(keys: Keys) -> None:
    async with echo_server(tls=tls_context(keys.server, keys.server)) as (server, _, address):
        host, port = address.rsplit(":", 1)
        plain = await trio.open_tcp_stream(host, int(port))
        await plain.send_all(b"GET / HTTP/1.1\r\n\r\n")
        while await plain.receive_some():
            pass
        context = ssl.create_default_context(cafile=str(keys.ca))
        other = await trio.open_ssl_over_tcp_stream(host, int(port), https_compatible=True, ssl_context=context)
        assert await other.receive_some() == b""
        await trio.aclose_forcefully(other)
        await plain.aclose()
        assert not server.connections
        served = await trio.to_thread.run_sync(
            lambda: call(grpc.secure_channel(address, credentials(keys)), request=b"t" * 1_000_000)
        )
        assert served == b"t" * 1_000_000


async def test_a_silent_tls_client_is_closed_after_the_handshake_time(keys: Keys) -> None:
    limits = replace(SMALL_LIMITS, handshake_seconds=0.05)
    async with echo_server(limits, tls=tls_context(keys.server, keys.server)) as (_, _, address):
        host, port = address.rsplit(":", 1)
        async with await trio.open_tcp_stream(host, int(port)) as silent:
            with trio.fail_after(WAIT_SECONDS):
                assert await silent.receive_some() == b""


def test_mismatched_and_missing_tls_files_are_errors(keys: Keys) -> None:
    with pytest.raises(ssl.SSLError):
        tls_context(keys.server, keys.client)
    with pytest.raises(FileNotFoundError):
        tls_context(keys.server, Path("/nowhere.key"))


async def test_a_unix_socket_replaces_a_stale_file_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with echo_server(address=f"unix:{path}") as (_, _, address):
        assert address == f"unix:{path}"
        reply = await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address), "Meta"))
        assert reply.startswith(b"unix:")
        with pytest.raises(OSError, match="another server listens"):
            async with open_listeners([f"unix:{path}"]):
                pass
        assert await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address))) == b"hello"
    assert not path.exists()


async def test_an_ordinary_file_at_the_path_of_a_socket_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="is not a socket"):
        async with open_listeners([f"unix:{path}"]):
            pass
    assert path.read_text() == "data"


async def test_ports_in_use_are_errors() -> None:
    async with open_listeners(["127.0.0.1:0"]) as (taken,):
        assert isinstance(taken, PlainListener)
        port = taken.socket.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            async with open_listeners(["127.0.0.1:0", f"127.0.0.1:{port}"]):
                pass


@pytest.mark.parametrize("address", ["localhost", ":http", "127.0.0.1:", "9000"])
async def test_invalid_addresses_are_quoted_in_the_error(address: str) -> None:
    with pytest.raises(ValueError, match=f"expected host:port.*{address}"):
        async with open_listeners([address]):
            pass


@pytest.mark.skipif(not socket.has_ipv6, reason="the machine has no IPv6")
async def test_an_ipv6_address_is_served_and_reported_in_brackets() -> None:
    try:
        async with echo_server(address="[::1]:0") as (_, _, address):
            assert address.startswith("[::1]:")
            assert await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address))) == b"hello"
    except* OSError:
        pytest.skip("the machine has no IPv6 loopback")
