"""Compressed messages: what they become, and what they never cost."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.inflation import GZIP_BITS, Inflation, InflationError
from ovmstrio.wire.grpc import Call, GrpcServer, TransportLimits
from ovmstrio.wire.grpc.inflation import Inflater
from tests.support.kept_by_errors import bytes_kept_by
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import HELLO, data, headers, message, request_headers
from tests.unit.wire.grpc.echo import BytesCodec
from tests.unit.wire.grpc.peers import MemoryListener

MIB = 2**20


@given(st.binary(max_size=300), st.integers(0, 500), st.integers(1, 400))
def test_messages_come_out_whole_however_they_are_made(unit: bytes, times: int, step: int) -> None:
    """A piece at a time or at once, up to exactly what they may become."""
    whole = unit * times
    inflation = Inflation(gzip.compress(whole, mtime=0), GZIP_BITS, len(whole))
    reached = 0
    while not inflation.go_on(reached):
        reached += step * 1_000
    assert inflation.finish() == whole


@pytest.mark.parametrize(
    ("packed", "status"),
    [
        (gzip.compress(b"a" * 1_001, mtime=0), Status.RESOURCE_EXHAUSTED),
        (gzip.compress(bytes(10_000_000), mtime=0), Status.RESOURCE_EXHAUSTED),
        (b"no gzip at all", Status.INVALID_ARGUMENT),
        (gzip.compress(b"a" * 500, mtime=0)[:-6], Status.INVALID_ARGUMENT),
        (b"", Status.INVALID_ARGUMENT),
    ],
    ids=["one byte too long", "a bomb", "no gzip", "cut off", "empty"],
)
async def test_what_is_no_message_is_refused(packed: bytes, status: Status) -> None:
    """Bombs, garbage and cut-off data have their status, and leave nothing in use."""
    inflater = Inflater(1_000)
    for _ in range(3):
        with pytest.raises(GRPCError) as caught:
            await inflater.inflate(packed)
        assert caught.value.status is status
    assert await inflater.inflate(gzip.compress(b"a" * 1_000, mtime=0)) == b"a" * 1_000


@pytest.mark.parametrize(
    ("packed", "status"),
    [
        (zlib.compress(b"a" * 1_001), Status.RESOURCE_EXHAUSTED),
        (zlib.compress(bytes(10_000_000)), Status.RESOURCE_EXHAUSTED),
        (gzip.compress(b"a", mtime=0), Status.INVALID_ARGUMENT),
        (zlib.compress(b"a" * 500)[:-2], Status.INVALID_ARGUMENT),
        (b"", Status.INVALID_ARGUMENT),
    ],
    ids=["one byte too long", "a bomb", "gzip", "cut off", "empty"],
)
async def test_deflated_messages_have_the_same_bounds(packed: bytes, status: Status) -> None:
    """They do not say how large they become, and leave nothing in use either."""
    inflater = Inflater(1_000)
    for _ in range(3):
        with pytest.raises(GRPCError) as caught:
            await inflater.inflate(packed, "deflate")
        assert caught.value.status is status
    assert await inflater.inflate(zlib.compress(b"a" * 1_000), "deflate") == b"a" * 1_000


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """Tell afterwards how much memory the block had at most."""
    most: list[int] = []
    tracemalloc.start()
    try:
        yield most
        most.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_a_bomb_costs_no_more_than_a_message() -> None:
    """Neither of what it would become nor of what it is made of are there copies."""
    bomb = gzip.compress(bytes(100 * MIB), 9)
    with most_memory() as most, pytest.raises(InflationError):
        Inflation(bomb, GZIP_BITS, 4 * MIB).finish()
    assert most[0] < 6 * MIB


def test_a_large_message_is_held_once() -> None:
    """It is made in one place, and that place is the message."""
    packed = gzip.compress(bytes(8 * MIB), mtime=0)
    with most_memory() as most:
        assert len(Inflation(packed, GZIP_BITS, 8 * MIB).finish()) == 8 * MIB
    assert most[0] < 12 * MIB


class _Holding:
    """Receives messages and keeps them until the test lets go."""

    def __init__(self) -> None:
        self.held = 0
        self.released = trio.Event()

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handlers by path."""
        return {
            "/test.Echo/One": Handler(self._one, Cardinality.UNARY_UNARY, bytes, bytes),
            "/test.Echo/Many": Handler(self._many, Cardinality.STREAM_UNARY, bytes, bytes),
        }

    async def _one(self, call: Call) -> None:
        received = await call.recv_message()
        self.held += 1
        await self.released.wait()
        await call.send_message(b"%d" % len(received))

    async def _many(self, call: Call) -> None:
        async for _ in call:
            self.held += 1
        await call.send_message(b"")


@pytest.mark.parametrize("method", ["One", "Many"])
async def test_many_bombs_on_a_connection_take_turns(method: str) -> None:
    """Messages that are small on the wire and as large as may be are in use one at a time, and all are answered."""
    count, size = 12, 4 * MIB
    packed = gzip.compress(bytes(size), mtime=0)
    prefixed = b"\1" + message(packed)[1:]
    limits = replace(TransportLimits(), max_receive_message_bytes=size)
    service, listener = _Holding(), MemoryListener(trio.testing.memory_stream_pair)
    server = GrpcServer([service], BytesCodec(), limits=limits)
    pairs = request_headers(f"/test.Echo/{method}", ("grpc-encoding", "gzip"))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [listener])
        raw = listener.connect()
        with most_memory() as most:
            script = [headers(n, pairs) + data(n, prefixed, end=True) for n in range(1, 2 * count, 2)]
            await raw.send_all(HELLO + b"".join(script))
            with trio.fail_after(WAIT_SECONDS):
                while service.held < (1 if method == "One" else count):
                    await trio.testing.wait_all_tasks_blocked(0.01)
            if method == "One":
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert service.held == 1
            service.released.set()
            answers = b""
            with trio.fail_after(WAIT_SECONDS):
                while answers.count(b"grpc-status") < count:
                    answers += bytes(await raw.receive_some())
        assert answers.count(b"\x0bgrpc-status\x010") == count
        assert most[0] < 2 * size + MIB
        nursery.cancel_scope.cancel()


async def test_small_messages_do_not_wait_for_large_ones() -> None:
    """As long as there is room, one that is made at once passes those in a thread."""
    inflater = Inflater(MIB)
    large = await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))
    assert await inflater.inflate(gzip.compress(b"small", mtime=0)) == b"small"
    with trio.move_on_after(0.05) as patience:
        await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))
    assert patience.cancelled_caught
    inflater.release(len(large))
    with trio.fail_after(WAIT_SECONDS):
        assert len(await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))) == 900_000


async def test_a_message_that_lies_about_its_size_is_refused() -> None:
    """What announces little and becomes much never takes the room of a message that it is not."""
    inflater = Inflater(MIB)
    lie = gzip.compress(bytes(900_000), mtime=0)[:-4] + (10).to_bytes(4, "little")
    with pytest.raises(GRPCError) as caught:
        await inflater.inflate(lie)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert len(await inflater.inflate(gzip.compress(bytes(MIB), mtime=0))) == MIB


@pytest.mark.parametrize(
    "packed", [gzip.compress(bytes(5 * MIB), mtime=0), gzip.compress(bytes(3 * MIB), mtime=0)[:-9]]
)
def test_an_error_does_not_keep_what_was_made(packed: bytes) -> None:
    """It leads to the frames that it went through, and may be held for long."""

    def refused() -> BaseException:
        with pytest.raises(InflationError) as caught:
            Inflation(packed, GZIP_BITS, 4 * MIB).finish()
        return caught.value

    assert bytes_kept_by(refused) < MIB // 2
