from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
import trustme

from ovmstrio.core.callers import Permission
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.transport.http.router import MissingRouteResponses, Router, rule
from ovmstrio.transport.http.server import HttpFrontEnd
from ovmstrio.transport.http.shutdown import IDLE_GRACE_SECONDS
from ovmstrio.transport.listeners import tls_context
from ovmstrio.transport.send_budget import ConnectionBudget, SendBudget, current_connection_budget
from tests.service.transport.http.conftest import GET_METADATA, MEBIBYTE, SLOW_BODY, chunk, chunked
from tests.support.waits import WAIT_SECONDS, until_async
from tests.unit.protocols.servers import BODY, Peer, Serving, infer_head, infer_post, serving_rest

FAST = infer_post()
LANES = pytest.mark.parametrize("request_bytes", [FAST, GET_METADATA], ids=["fast", "application"])
GRACE_SECONDS = 3600


@asynccontextmanager
async def _draining(serving: Serving) -> AsyncIterator[None]:
    """Drain while the block runs; the drain must end with the block."""
    cut: list[int] = []

    async def drain() -> None:
        cut.append(await serving.front_end.drain(GRACE_SECONDS))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked(0.01)
            yield
    assert cut == [0]


@LANES
async def test_a_request_on_an_idle_connection_is_answered_during_a_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await peer.rest() == b""


@LANES
async def test_first_requests_of_open_and_unaccepted_connections_are_answered_during_a_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    # The last connection has not been accepted yet, as no task has run since.
    async with serving.connect() as used, serving.connect() as waiting, _draining(serving):
        for peer in (waiting, used):
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


@LANES
async def test_pipelined_requests_are_answered_during_a_drain(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        async with _draining(serving):
            await peer.send(request_bytes * 5)
            answers = [await peer.answer() for _ in range(5)]
            assert [each.status for each in answers] == [200] * 5
            assert answers[-1].headers["connection"] == "close"
            assert await peer.rest() == b""


@LANES
async def test_answers_say_connection_close_once_a_drain_has_begun(serving: Serving, request_bytes: bytes) -> None:
    serving.front_end.begin_drain()
    for _ in range(2):
        async with serving.connect() as peer:
            answer = await peer.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_bytes_sent_after_the_last_request_do_not_reset_the_connection(serving: Serving) -> None:
    numbers = b",".join([b"1.25"] * 200_000)
    body = b'{"inputs":[{"name":"x","shape":[200000],"datatype":"FP32","data":[%b]}]}' % numbers
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        async with _draining(serving):
            await peer.send(infer_post(body))
            await trio.testing.wait_all_tasks_blocked(0.1)
            await peer.send(b"GET / HTTP/1.1\r\n")
            answer = await peer.answer()
            assert len(answer.json["outputs"][0]["data"]) == 200_000
            assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("sent", [b"", FAST, GET_METADATA], ids=["new", "fast", "application"])
async def test_idle_connections_are_closed_after_the_idle_grace(serving: Serving, sent: bytes) -> None:
    async with serving.connect() as peer:
        if sent:
            await peer.ask(sent)
        began = trio.current_time()
        async with _draining(serving):
            assert await peer.rest() == b""
        assert trio.current_time() - began >= IDLE_GRACE_SECONDS


@LANES
async def test_a_short_grace_does_not_cut_idle_connections(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.ask(request_bytes)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.05) == 0


async def test_a_pipelined_request_does_not_delay_the_end_of_a_drain(serving: Serving) -> None:
    async with serving.connect() as peer:
        await peer.send(chunked(SLOW_BODY) + GET_METADATA)
        await serving.wait_blocked()
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1
        await serving.wait_closed()


@pytest.mark.parametrize("sent", [infer_head(100)[:-9], infer_head(100) + b"{", GET_METADATA[:-7]])
async def test_an_incomplete_request_is_cut_off_after_the_grace(tmp_path: Path, sent: bytes) -> None:
    async with serving_rest(tmp_path) as serving, serving.connect() as peer:
        await peer.send(sent)
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(WAIT_SECONDS):
            assert await serving.front_end.drain(0.2) == 1


@pytest.mark.parametrize("steps", range(20))
async def test_a_drain_may_begin_at_any_step_of_a_connection_reset(serving: Serving, steps: int) -> None:
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        await peer.send(GET_METADATA)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    with trio.fail_after(60):
        assert await serving.front_end.drain(GRACE_SECONDS) == 0
    assert serving.front_end.open_connections == 0


CHUNKED = "Transfer-Encoding: chunked"


async def _still_serves(serving: Serving) -> None:
    async with serving.connect() as peer:
        assert (await peer.ask(infer_post())).status == 200
        assert (await peer.ask(GET_METADATA)).status == 200


SPACES = b" " * 100_000


@pytest.mark.parametrize(
    ("start", "more"),
    [
        pytest.param(infer_head(4 * MEBIBYTE) + SPACES, SPACES, id="length"),
        pytest.param(infer_head(4 * MEBIBYTE, "Connection: close") + SPACES, SPACES, id="close"),
        pytest.param(infer_head(4 * MEBIBYTE, "Expect: 100-continue") + SPACES, SPACES, id="expect"),
        pytest.param(infer_head(None, CHUNKED) + chunk(SPACES) * 12, chunk(SPACES), id="chunked"),
    ],
)
async def test_an_upload_above_the_limit_gets_its_answer_before_its_end(
    tmp_path: Path, start: bytes, more: bytes
) -> None:
    async with serving_rest(tmp_path, front_end={"max_body_bytes": MEBIBYTE}) as serving:
        async with serving.connect() as peer:
            await peer.send(start)
            answer = await peer.answer()
            assert answer.status == 413
            assert "--max-message-size" in answer.json["error"]
            assert str(MEBIBYTE) in answer.json["error"]
            for _ in range(4):
                await peer.send(more)
            await peer.stream.aclose()
        await _still_serves(serving)
        await serving.wait_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
        b"\0" * 1_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
        infer_head(None, CHUNKED) + b"zz\r\n",
        infer_head(None, CHUNKED) + chunk(BODY) + b"5\r\nab\r\n0\r\n\r\n",
        GET_METADATA + b"\xff\xfe garbage behind a request\r\n\r\n",
    ],
    ids=["tls", "zeros", "version", "chunk size", "chunk end", "behind a request"],
)
async def test_bytes_that_are_not_http_end_only_their_connection(serving: Serving, garbage: bytes) -> None:
    async with serving.connect() as other:
        await other.send(infer_post(SLOW_BODY))
        await serving.wait_blocked()
        async with serving.connect() as peer:
            await peer.send(garbage)
            await peer.stream.send_eof()  # type: ignore[attr-defined]
            answered = await peer.rest()
            assert b" 500 " not in answered
        await _still_serves(serving)
        assert not serving.servable.cancelled.is_set()


@pytest.mark.parametrize(
    "request_bytes", [infer_post(SLOW_BODY), chunked(SLOW_BODY), GET_METADATA, chunked(SLOW_BODY)[:-20]]
)
async def test_a_reset_ends_only_its_connection(serving: Serving, request_bytes: bytes) -> None:
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        if request_bytes.endswith((b"}", b"0\r\n\r\n")):
            await serving.wait_blocked()
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await serving.wait_closed()
    await _still_serves(serving)


async def _ask_for_much(peer: Peer, count: int, head: bytes) -> None:
    with trio.move_on_after(0.3):
        for _ in range(count):
            await peer.stream.send_all(head)


@pytest.mark.parametrize("lane", ["fast", "application"])
async def test_a_client_that_does_not_read_delays_neither_others_nor_the_drain(serving: Serving, lane: str) -> None:
    numbers = b",".join([b"1.25"] * 100_000)
    body = b'{"inputs":[{"name":"x","shape":[100000],"datatype":"FP32","data":[%b]}]}' % numbers
    request = infer_post(body) if lane == "fast" else chunked(body)
    async with serving.connect() as peer:
        assert isinstance(peer.stream, trio.SocketStream)
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await _ask_for_much(peer, 40, request)
        await _still_serves(serving)
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert serving.front_end.open_connections == 0


@pytest.mark.parametrize("request_bytes", [infer_post(SLOW_BODY), chunked(SLOW_BODY)], ids=["fast", "application"])
async def test_an_endless_call_is_cancelled_after_the_grace_of_the_drain(
    serving: Serving, request_bytes: bytes
) -> None:
    async with serving.connect() as peer:
        await peer.send(request_bytes)
        await serving.wait_blocked()
        began = trio.current_time()
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.5)
        assert trio.current_time() - began >= 0.5
        assert serving.servable.cancelled.is_set()
        assert serving.front_end.open_connections == 0


async def test_an_unread_body_does_not_block_its_answer(serving: Serving) -> None:
    body = b"x" * 300_000
    async with serving.connect() as peer:
        head = b"POST /v2/nothing HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.send, head + body)
            answer = await peer.answer()
        assert answer.status == 400
        if answer.headers.get("connection") == "close":
            assert await peer.rest() == b""
        else:
            assert (await peer.ask(GET_METADATA)).status == 200
        await _still_serves(serving)


@pytest.mark.parametrize(
    "preface",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    ],
    ids=["preface", "preface and settings"],
)
async def test_http2_without_asking_is_refused_in_http1(serving: Serving, preface: bytes) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(preface)
        assert 400 <= answer.status < 500
        assert "error" in answer.json
        await peer.rest()
    await _still_serves(serving)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_upgrades_are_ignored(serving: Serving, protocol: str) -> None:
    upgrade = f"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n"
    more = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    async with serving.connect() as peer:
        answer = await peer.ask((upgrade + more).encode())
        assert answer.status == 200
        assert answer.json["name"] == "echo"
        assert (await peer.ask(GET_METADATA)).status == 200


SIZE = 30_000_000
LARGE_LANES = {"fast": b"", "application": b"TE: trailers\r\n"}


class _Refusals(MissingRouteResponses):
    def no_path(self, method: str, path: str) -> HttpAnswer:
        return HttpAnswer(404)

    def no_method(self, method: str, path: str, allowed: Collection[str] = ()) -> HttpAnswer:
        return HttpAnswer(405)


Serve = Callable[[SendBudget], Awaitable[str]]


@pytest.fixture
async def serve(nursery: trio.Nursery) -> AsyncIterator[Serve]:
    """Yield a function that serves a large answer and returns the address."""

    async def view(_request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (), bytes(SIZE))

    async def start(pending: SendBudget) -> str:
        router = Router([rule("/large", "GET", view, is_hot=True, need=Permission.NOTHING)], _Refusals())
        front_end = HttpFrontEnd(["127.0.0.1:0"], router, pending=pending)
        addresses: list[str] = await nursery.start(front_end.serve)
        return addresses[0]

    yield start
    nursery.cancel_scope.cancel()


async def _ask(address: str, lane: bytes) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\n" + lane + b"\r\n")
    return stream


@pytest.mark.parametrize("lane", LARGE_LANES.values(), ids=LARGE_LANES)
async def test_bytes_of_an_answer_count_until_the_client_reads_or_leaves(serve: Serve, lane: bytes) -> None:
    pending = SendBudget()
    address = await serve(pending)
    async with await _ask(address, lane) as stream:
        await until_async(lambda: pending.budget.held >= SIZE)
        taken = 0
        with trio.fail_after(WAIT_SECONDS):
            while taken < SIZE:
                taken += len(await stream.receive_some(1_000_000))
        await until_async(lambda: pending.budget.held == 0)
        await stream.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\n" + lane + b"\r\n")
        await until_async(lambda: pending.budget.held >= SIZE)
    await until_async(lambda: pending.budget.held == 0)


@pytest.mark.parametrize("lane", LARGE_LANES.values(), ids=LARGE_LANES)
async def test_clients_that_read_nothing_are_cut_off_after_the_stall_limit(serve: Serve, lane: bytes) -> None:
    pending = SendBudget(stalled_seconds=0.3)
    address = await serve(pending)
    async with await _ask(address, lane):
        await until_async(lambda: pending.budget.held >= SIZE)
        await until_async(lambda: pending.budget.held == 0)


async def test_requests_of_a_connection_have_the_same_share(nursery: trio.Nursery) -> None:
    seen: list[ConnectionBudget | None] = []

    async def view(_request: HttpRequest) -> HttpAnswer:
        seen.append(current_connection_budget.get())
        return HttpAnswer(200, (), b"")

    front_end = HttpFrontEnd(
        ["127.0.0.1:0"], Router([rule("/large", "GET", view, is_hot=True, need=Permission.NOTHING)], _Refusals())
    )
    (address,) = await nursery.start(front_end.serve)
    async with await _ask(address, b"") as one, await _ask(address, LARGE_LANES["application"]):
        await one.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\nTE: trailers\r\n\r\n")
        await until_async(lambda: len(seen) == 3)
    assert None not in seen
    assert sorted(map(seen.count, set(seen))) == [1, 2]
    nursery.cancel_scope.cancel()


INFER = "/v2/models/echo/infer"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _server_context(authority: trustme.CA, folder: Path, *, mutual: bool) -> ssl.SSLContext:
    certificate = authority.issue_cert("localhost")
    key, chain, ca = folder / "key.pem", folder / "chain.pem", folder / "ca.pem"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(ca)
    return tls_context(chain, key, ca if mutual else None, protocol="http/1.1")


def _client_context(authority: trustme.CA, issuer: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if issuer is not None:
        issuer.issue_cert("client@localhost").configure_cert(context)
    return context


async def _statuses(address: str, context: ssl.SSLContext) -> tuple[int, int]:
    url = f"https://localhost:{address.rpartition(':')[2]}"

    def work() -> tuple[int, int]:
        with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
            return client.post(INFER, content=BODY).status_code, client.get("/v2/models/echo").status_code

    return await trio.to_thread.run_sync(work)


@pytest.mark.parametrize("mutual", [False, True])
async def test_one_tls_connection_serves_both_lanes(authority: trustme.CA, tmp_path: Path, *, mutual: bool) -> None:
    tls = _server_context(authority, tmp_path, mutual=mutual)
    context = _client_context(authority, authority if mutual else None)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving:
        assert await _statuses(serving.address, context) == (200, 200)
        await serving.wait_closed()


@pytest.mark.parametrize("issuer", [None, trustme.CA()], ids=["no certificate", "a stranger's certificate"])
async def test_clients_without_a_trusted_certificate_are_refused(
    authority: trustme.CA, tmp_path: Path, issuer: trustme.CA | None
) -> None:
    tls = _server_context(authority, tmp_path, mutual=True)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving:
        with pytest.raises(httpx.TransportError):
            await _statuses(serving.address, _client_context(authority, issuer))
        assert await _statuses(serving.address, _client_context(authority, authority)) == (200, 200)
        await serving.wait_closed()


async def test_plain_http_and_unfinished_handshakes_on_a_tls_port_end_only_their_connections(
    authority: trustme.CA, tmp_path: Path
) -> None:
    tls = _server_context(authority, tmp_path, mutual=False)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving, serving.connect() as silent:
        async with serving.connect() as peer:
            await peer.send(infer_post())
            assert b"HTTP/1.1 200" not in await peer.rest()
        assert await _statuses(serving.address, _client_context(authority)) == (200, 200)
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.1)
        assert await silent.rest() == b""


async def test_a_unix_socket_serves_both_lanes_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rest.sock"
    async with serving_rest(tmp_path, address=f"unix:{path}"), await trio.open_unix_socket(path) as stream:
        peer = Peer(stream)
        assert (await peer.ask(infer_post())).json["outputs"][0]["data"] == [0.5, -1.0]
        metadata = await peer.ask(b"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\n\r\n")
        assert metadata.json["versions"] == ["1", "2"]
    assert not path.exists()
