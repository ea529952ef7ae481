from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import Buffer
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.transport.direct_stream import LINGER_SECONDS, DirectStream, run_eagerly, to_direct_stream
from ovmstrio.transport.http.application import PrefixedStream
from ovmstrio.transport.http.bounded_send import PushedBody, send_bounded, send_response
from ovmstrio.transport.http.fast_path import FastPathConnection
from ovmstrio.transport.send_budget import SendBudget, current_connection_budget, unsent_bytes
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import stack

MUCH = bytes(range(256)) * 40_000
"""More than sockets of both ends take."""
PATIENCE_SECONDS = 60


@asynccontextmanager
async def _pair() -> AsyncIterator[tuple[DirectStream, trio.SocketStream]]:
    ours, theirs = trio.socket.socketpair()
    stream = to_direct_stream(trio.SocketStream(ours))
    assert isinstance(stream, DirectStream)
    async with stream, trio.SocketStream(theirs) as peer:
        with trio.fail_after(PATIENCE_SECONDS):
            yield stream, peer


async def _take(peer: trio.SocketStream, size: int) -> bytes:
    taken = bytearray()
    while len(taken) < size and (data := await peer.receive_some(100_000)):
        taken += data
    return bytes(taken)


async def test_sent_bytes_and_buffers_arrive() -> None:
    async with _pair() as (stream, peer):
        await stream.send_all(b"small")
        assert await peer.receive_some() == b"small"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, MUCH)
            assert await _take(peer, len(MUCH)) == MUCH
        async with trio.open_nursery() as nursery:
            pieces: list[Buffer] = [b"head", b"", MUCH, memoryview(MUCH)[:1000], *[b"x"] * 2000]
            nursery.start_soon(stream.send_buffers, pieces)
            expected = b"".join(pieces)
            assert await _take(peer, len(expected)) == expected


async def test_bytes_are_received_until_the_end_of_the_stream() -> None:
    async with _pair() as (stream, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.send_all, MUCH)
            received, target = bytearray(await stream.receive_some(10)), memoryview(bytearray(50_000))
            while len(received) < len(MUCH):
                received += await stream.receive_some()
                if len(received) < len(MUCH):
                    received += target[: await stream.receive_into(target)]
        assert received == MUCH
        await peer.send_eof()
        assert await stream.receive_some() == b""
        assert await stream.receive_into(target) == 0


async def test_expected_bytes_are_polled_before_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _pair() as (stream, peer):
        await peer.send_all(b"soon")
        monkeypatch.setattr(trio.lowlevel, "wait_readable", None)
        stream.expect()
        with trio.testing.assert_checkpoints():
            assert await stream.receive_some() == b"soon"


async def test_expected_bytes_that_arrive_late_are_received() -> None:
    async with _pair() as (stream, peer), trio.open_nursery() as nursery:

        async def send_late() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await peer.send_all(b"late")

        for _ in range(100):
            nursery.start_soon(send_late)
            stream.expect()
            assert await stream.receive_some() == b"late"


async def test_pieces_of_a_pushed_body_arrive_in_order_though_the_socket_is_full() -> None:
    async with _pair() as (stream, peer), trio.open_nursery() as nursery:
        body, written = PushedBody(), 0
        nursery.start_soon(partial(send_response, stream, HttpAnswer(200, (), body), keep_alive=True))

        async def produce() -> None:
            nonlocal written
            for number in range(200):
                piece = b"%d," % number * 10_000
                if body.can_write:
                    body.write(piece)
                    written += 1
                else:
                    await body.send(piece)
                await trio.lowlevel.checkpoint()
            body.close()

        nursery.start_soon(produce)
        # The socket is full now.
        await trio.testing.wait_all_tasks_blocked()
        taken = bytearray()
        while not taken.endswith(b"\r\n0\r\n\r\n"):
            taken += await peer.receive_some(100_000)
        _, _, chunks = taken.partition(b"\r\n\r\n")
        for number in range(200):
            piece = b"%d," % number * 10_000
            is_next = chunks.startswith(b"%x\r\n%b\r\n" % (len(piece), piece))
            assert is_next, number
            del chunks[: len(piece) + len(b"%x" % len(piece)) + 4]
        assert bytes(chunks) == b"0\r\n\r\n"
        assert 0 < written < 200


async def test_a_pushed_body_is_written_without_a_turn_of_the_event_loop() -> None:
    async with _pair() as (stream, peer), trio.open_nursery() as nursery:
        body = PushedBody()
        nursery.start_soon(partial(send_response, stream, HttpAnswer(200, (), body), keep_alive=True))
        could_write = body.can_write
        await trio.testing.wait_all_tasks_blocked()
        head = await peer.receive_some()
        assert (could_write, body.can_write) == (False, True)
        body.write(b"")
        body.write(b"event")
        assert await peer.receive_some() == b"5\r\nevent\r\n"
        assert head.startswith(b"HTTP/1.1 200")
        await peer.aclose()
        with pytest.raises(trio.BrokenResourceError):
            body.write(b"event")
        nursery.cancel_scope.cancel()


async def test_a_second_sender_is_refused() -> None:
    async with _pair() as (stream, peer), trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, MUCH)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.send_all(b"other")
        assert stream.send_now(b"other") == 0
        assert await _take(peer, len(MUCH)) == MUCH


async def test_broken_and_closed_connections_raise_different_errors() -> None:
    async with _pair() as (stream, peer):
        await peer.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"a")
        await stream.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"a")
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive_some()
    async with _pair() as (stream, _):
        await stream.send_eof()
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"a")
        with pytest.raises(trio.ClosedResourceError):
            stream.send_now(b"a")
    async with _pair() as (stream, peer), trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, MUCH)
        await trio.testing.wait_all_tasks_blocked()
        stream.socket.shutdown(trio.socket.SHUT_WR)
        with pytest.raises(trio.ClosedResourceError):
            stream.send_now(b"a")
        nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_no_bytes() -> None:
    async with _pair() as (stream, peer):
        with trio.move_on_after(0):
            await stream.receive_some()
        await peer.send_all(b"kept")
        assert await stream.receive_some() == b"kept"


async def test_waiting_is_reported_once_per_coroutine_that_waits() -> None:
    reported: list[bool] = []

    def report() -> None:
        reported.append(True)

    async def at_once() -> int:
        return 7

    async def later(*, fails: bool) -> int:
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        if fails:
            raise ValueError("it failed")
        return 8

    assert await run_eagerly(at_once(), report) == 7
    assert reported == []
    assert await run_eagerly(later(fails=False), report) == 8
    assert reported == [True]
    with pytest.raises(ValueError, match="it failed"):
        await run_eagerly(later(fails=True), report)
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_eagerly(later(fails=False), report)
    assert scope.cancelled_caught
    assert reported == [True] * 3


async def test_unsent_bytes_are_counted_until_the_socket_is_closed() -> None:
    left, right = trio.socket.socketpair()
    stream = trio.SocketStream(left)
    with right:
        assert unsent_bytes(stream) == 0
        await stream.send_all(b"12345")
        assert unsent_bytes(stream) >= 5
        await stream.aclose()
        assert unsent_bytes(stream) == 0


Pair = tuple[trio.SocketStream, trio.SocketStream]


@pytest.fixture
async def sockets() -> AsyncIterator[Pair]:
    left, right = trio.socket.socketpair()
    async with trio.SocketStream(left) as server, trio.SocketStream(right) as client:
        yield server, client


async def test_sending_after_eof_raises_at_once(sockets: Pair) -> None:
    server, _ = sockets
    stream = to_direct_stream(server)
    await server.send_eof()
    with trio.fail_after(WAIT_SECONDS):
        await send_bounded(stream, b"")
        with pytest.raises(trio.ClosedResourceError):
            await send_bounded(stream, b"late")


async def test_a_client_that_reads_in_small_parts_is_served(autojump_clock: MockClock, sockets: Pair) -> None:
    server, client = sockets
    pending = SendBudget(stalled_seconds=10)
    current_connection_budget.set(pending.share())
    sent = trio.Event()

    async def send() -> None:
        await send_bounded(server, b"x" * 1_000_000)
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pending.watch)
        nursery.start_soon(send)
        left = 1_000_000
        for _ in range(15):
            await trio.sleep(3)
            left -= len(await client.receive_some(32_768))
            assert not sent.is_set()
        assert pending.budget.held == 1_000_000
        while left:
            left -= len(await client.receive_some(left))
        await sent.wait()
        nursery.cancel_scope.cancel()
    assert pending.budget.held == 0


async def test_bytes_of_the_prefix_are_received_before_those_of_the_connection(sockets: Pair) -> None:
    server, client = sockets
    stream = PrefixedStream(server, b"first")
    await client.send_all(b"second")
    await client.send_eof()
    assert [await stream.receive_some(100) for _ in range(4)] == [b"first", b"second", b"", b""]


async def test_bytes_received_after_the_last_answer_are_dropped_until_the_linger_time(
    autojump_clock: MockClock, sockets: Pair
) -> None:
    server, client = sockets
    stream = PrefixedStream(server, b"")
    async with trio.open_nursery() as nursery:
        received: list[bytes] = []

        async def read() -> None:
            received.append(await stream.receive_some(100))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        await stream.finish()
        assert await client.receive_some() == b""
        for _ in range(3):
            await client.send_all(b"late" * 10_000)
    assert received == [b""]
    assert trio.current_time() - started == pytest.approx(LINGER_SECONDS)
    assert await stream.receive_some() == b""


async def test_a_broken_connection_can_be_finished_and_closed_repeatedly(sockets: Pair) -> None:
    server, client = sockets
    stream = PrefixedStream(server, b"")
    await client.aclose()
    await stream.finish()
    await stream.aclose()
    await stream.finish()
    await stream.aclose()


class _InTwoPieces(trio.abc.Stream):
    def __init__(self, first: bytes, second: bytes) -> None:
        self.pieces = [first, second]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self.pieces:
            await trio.sleep_forever()
        piece = self.pieces.pop(0)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return piece

    async def send_all(self, data: object) -> None:
        raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        raise trio.BrokenResourceError

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_connection_that_leaves_the_fast_lane_loses_no_bytes(tmp_path: Path) -> None:
    async with stack(tmp_path) as (plane, _, _):
        for _ in range(50):
            stream = _InTwoPieces(b"HEAD /v2 HTTP/1.1\r\n", b"Host: h\r\n\r\n")
            with trio.fail_after(WAIT_SECONDS):
                left = await FastPathConnection(make_rest_router(plane), stream, 1000).run()
            assert left is not None
            taken = b"HEAD /v2 HTTP/1.1\r\n" + (b"" if stream.pieces else b"Host: h\r\n\r\n")
            assert left == taken
