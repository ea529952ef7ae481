from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.encoding.inflate import GZIP_BITS, Inflation, InflationError
from ovmstrio.transport.grpc.call import Call, Inflater
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.messages import MessageBuffer
from ovmstrio.util.buffers import PiecedMessage
from tests.support.error_memory import bytes_referenced_by
from tests.support.examples import examples
from tests.support.waits import WAIT_SECONDS
from tests.unit.transport.grpc.bytes_client import HELLO, data, headers, message, request_headers
from tests.unit.transport.grpc.echo import Echo
from tests.unit.transport.grpc.peers import connected, memory_server


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(1, 200)), st.booleans())
def test_messages_are_complete_and_in_order_however_the_bytes_are_split(
    payloads: list[bytes], cuts: list[int], eager: bool
) -> None:
    stream = b"".join(map(message, payloads))
    buffer = MessageBuffer()
    taken = []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        buffer.append(stream[start:end])
        while eager and (item := buffer.take(30)) is not None:
            taken.append(item)
    while (item := buffer.take(30)) is not None:
        taken.append(item)
    assert taken == [(0, payload) for payload in payloads]
    assert buffer.size == 0


@given(st.integers(60_000, 200_000), st.lists(st.integers(1, 200_000)), st.binary(max_size=10))
def test_a_large_message_is_readonly_with_an_aligned_end_however_it_is_split(
    size: int, cuts: list[int], other: bytes
) -> None:
    payloads = [other, np.arange(size, dtype=np.uint8).tobytes(), other]
    stream = b"".join(map(message, payloads))
    buffer = MessageBuffer()
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        buffer.append(memoryview(stream)[start:end])
    taken = [buffer.take_aligned(200_000) for _ in payloads]
    assert [(each[0], bytes(each[1])) for each in taken if each] == [(0, payload) for payload in payloads]
    assert buffer.take_aligned(200_000) is None
    assert [type(each[1]) for each in taken if each] == [bytes, memoryview if size >= 2**16 else bytes, bytes]
    large = taken[1][1] if taken[1] else b""
    if isinstance(large, memoryview):
        assert large.readonly
        assert (np.frombuffer(large, np.uint8).ctypes.data + size) % 64 == 0


def test_bytes_received_in_small_parts_use_little_more_memory_than_their_size() -> None:
    buffer, crumb = MessageBuffer(), message(bytes(200_000))
    tracemalloc.start()
    try:
        for start in range(0, len(crumb), 2):
            buffer.append(crumb[start : start + 2])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * len(crumb)
    assert buffer.take(200_000) == (0, bytes(200_000))


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

    assert bytes_referenced_by(refused) < MIB // 2


LARGE = 64 * 1024
sizes = st.one_of(st.integers(0, 40), st.integers(LARGE - 2, LARGE + 2), st.integers(0, 3 * LARGE))


def _part(number: int, size: int) -> bytes | memoryview:
    data = bytes([number]) * size
    return memoryview(data) if number % 2 else data


class _Parts:
    def __init__(self, parts: list[bytes | memoryview]) -> None:
        self.parts = parts

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Echo/Parts": Handler(self._answer, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _answer(self, call: Call) -> None:
        await call.recv_message()
        for _ in range(2):
            await call.send_message(PiecedMessage(self.parts))


async def _received(parts: list[bytes | memoryview], grants: list[int]) -> tuple[bytes, str]:
    """Return the body and status that a peer receives when it opens its windows by ``grants`` in turn."""
    async with connected(service=_Parts(parts)) as (peer, _, _):
        call = await peer.request("Parts")
        left = 2 * (5 + sum(map(len, parts))) + 1
        while left > 0:
            for grant in grants:
                left -= grant
                peer.h2.increment_flow_control_window(grant)
                peer.h2.increment_flow_control_window(grant, call)
                await peer.flush()
                await trio.testing.wait_all_tasks_blocked()
        status = (await peer.trailers(call))["grpc-status"]
    return peer.body(call), status


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(sizes, max_size=6), st.lists(st.integers(5_000, 200_000), min_size=1, max_size=4))
def test_a_message_in_pieces_arrives_joined_however_the_windows_open(lengths: list[int], grants: list[int]) -> None:
    parts = [_part(number, size) for number, size in enumerate(lengths)]
    whole = b"".join(parts)
    assert len(PiecedMessage(parts)) == len(whole)
    assert trio.run(_received, parts, grants) == (message(whole) * 2, "0")


def test_large_pieces_are_not_copied_and_small_ones_are_joined() -> None:
    large, other = bytearray(LARGE), bytearray(LARGE)
    pieces = PiecedMessage([b"ab", b"c", memoryview(large), memoryview(other), b"d", memoryview(b"e")]).pieces
    assert [before for before, _ in pieces] == [b"abc", b"", b"de"]
    assert [piece.obj is array for (_, piece), array in zip(pieces, (large, other), strict=False)] == [True, True]
    assert not pieces[2][1]


MESSAGES = 320


async def test_ready_messages_share_writes_and_other_tasks_run_after_sixteen() -> None:
    writes = 0
    seen: list[int] = []

    def pair() -> tuple[Any, Any]:
        client, server = trio.testing.memory_stream_pair()
        send_all = server.send_all

        async def counting(data: bytes | bytearray | memoryview) -> None:
            nonlocal writes
            writes += 1
            await send_all(data)

        server.send_all = counting  # type: ignore[method-assign]
        return client, server

    async def watch(service: Echo) -> None:
        while True:
            seen.append(service.produced)
            await trio.lowlevel.checkpoint()

    async with connected(make_pair=pair) as (peer, _, service), trio.open_nursery() as nursery:
        nursery.start_soon(watch, service)
        stream_id = await peer.request("Split", b"%d 10" % MESSAGES)
        trailers = await peer.trailers(stream_id)
        nursery.cancel_scope.cancel()
    assert trailers["grpc-status"] == "0"
    assert len(peer.body(stream_id)) == MESSAGES * 15
    # Tasks that are ready run in any order, so that two turns of one may lie between two of the other.
    assert max(late - early for early, late in pairwise(seen)) <= 2 * 16
    assert writes < MESSAGES / 4
