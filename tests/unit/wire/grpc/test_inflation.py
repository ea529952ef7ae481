from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.inflation import GZIP_BITS, Inflation, InflationError
from ovmstrio.wire.grpc import Call, TransportLimits
from ovmstrio.wire.grpc.inflation import Inflater
from tests.support.kept_by_errors import bytes_kept_by
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import HELLO, data, headers, message, request_headers
from tests.unit.wire.grpc.peers import memory_server

MIB = 2**20


@given(st.binary(max_size=300), st.integers(0, 500), st.integers(1, 400))
def test_inflated_messages_are_complete_in_steps_of_any_size(unit: bytes, times: int, step: int) -> None:
    whole = unit * times
    inflation = Inflation(gzip.compress(whole, mtime=0), GZIP_BITS, len(whole))
    reached = 0
    while not inflation.go_on(reached):
        reached += step * 1_000
    assert inflation.finish() == whole


PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": partial(gzip.compress, mtime=0), "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize(
    ("make", "status"),
    [
        pytest.param(lambda pack: pack(b"a" * 1_001), Status.RESOURCE_EXHAUSTED, id="one byte too long"),
        pytest.param(lambda pack: pack(bytes(10_000_000)), Status.RESOURCE_EXHAUSTED, id="bomb"),
        pytest.param(lambda _: b"not compressed", Status.INVALID_ARGUMENT, id="not compressed"),
        pytest.param(lambda pack: pack(b"a" * 500)[:-2], Status.INVALID_ARGUMENT, id="truncated"),
        pytest.param(lambda _: b"", Status.INVALID_ARGUMENT, id="empty"),
    ],
)
async def test_invalid_compressed_messages_are_refused_and_use_no_room(
    encoding: str, make: Callable[[Any], bytes], status: Status
) -> None:
    inflater, pack = Inflater(1_000), PACKERS[encoding]
    for _ in range(3):
        with pytest.raises(GRPCError) as caught:
            await inflater.inflate(make(pack), encoding)
        assert caught.value.status is status
    assert await inflater.inflate(pack(b"a" * 1_000), encoding) == b"a" * 1_000


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """Yield a list that gets the peak of allocated bytes at the end of the block."""
    most: list[int] = []
    tracemalloc.start()
    try:
        yield most
        most.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_a_bomb_uses_no_more_memory_than_the_largest_message() -> None:
    bomb = gzip.compress(bytes(100 * MIB), 9)
    with most_memory() as most, pytest.raises(InflationError):
        Inflation(bomb, GZIP_BITS, 4 * MIB).finish()
    assert most[0] < 6 * MIB


def test_a_large_message_is_inflated_without_a_copy() -> None:
    packed = gzip.compress(bytes(8 * MIB), mtime=0)
    with most_memory() as most:
        assert len(Inflation(packed, GZIP_BITS, 8 * MIB).finish()) == 8 * MIB
    assert most[0] < 12 * MIB


class _Holding:
    """Receives messages and keeps them until ``released``."""

    def __init__(self) -> None:
        self.held = 0
        self.released = trio.Event()

    def __mapping__(self) -> dict[str, Handler]:
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
async def test_large_compressed_messages_of_a_connection_are_in_memory_one_at_a_time(method: str) -> None:
    count, size = 12, 4 * MIB
    packed = gzip.compress(bytes(size), mtime=0)
    prefixed = b"\1" + message(packed)[1:]
    limits, service = TransportLimits(max_receive_message_bytes=size), _Holding()
    pairs = request_headers(f"/test.Echo/{method}", ("grpc-encoding", "gzip"))
    async with memory_server(limits, service=service) as (_, _, connect):
        raw = connect().stream
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


async def test_small_messages_do_not_wait_for_large_ones() -> None:
    inflater = Inflater(MIB)
    large = await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))
    assert await inflater.inflate(gzip.compress(b"small", mtime=0)) == b"small"
    with trio.move_on_after(0.05) as patience:
        await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))
    assert patience.cancelled_caught
    inflater.release(len(large))
    with trio.fail_after(WAIT_SECONDS):
        assert len(await inflater.inflate(gzip.compress(bytes(900_000), mtime=0))) == 900_000


async def test_a_message_with_a_false_size_is_refused_and_uses_no_room() -> None:
    inflater = Inflater(MIB)
    lie = gzip.compress(bytes(900_000), mtime=0)[:-4] + (10).to_bytes(4, "little")
    with pytest.raises(GRPCError) as caught:
        await inflater.inflate(lie)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert len(await inflater.inflate(gzip.compress(bytes(MIB), mtime=0))) == MIB


@pytest.mark.parametrize(
    "packed", [gzip.compress(bytes(5 * MIB), mtime=0), gzip.compress(bytes(3 * MIB), mtime=0)[:-9]]
)
def test_an_inflation_error_does_not_keep_the_inflated_bytes(packed: bytes) -> None:
    def refused() -> BaseException:
        with pytest.raises(InflationError) as caught:
            Inflation(packed, GZIP_BITS, 4 * MIB).finish()
        return caught.value

    assert bytes_kept_by(refused) < MIB // 2
