from __future__ import annotations

from itertools import pairwise
from typing import Any

import trio
import trio.testing
from grpclib.const import Cardinality, Handler
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.grpc import Call
from tests.support.examples import examples
from tests.unit.wire.grpc.bytes_client import message
from tests.unit.wire.grpc.peers import memory_server

LARGE = 64 * 1024
sizes = st.one_of(st.integers(0, 40), st.integers(LARGE - 2, LARGE + 2), st.integers(0, 3 * LARGE))


def _part(number: int, size: int) -> bytes | memoryview:
    data = bytes([number]) * size
    return memoryview(data) if number % 2 else data


class _Parts:
    """Answers with two messages of the same parts."""

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
    async with memory_server(service=_Parts(parts)) as (_, _, connect):
        peer = await connect().start()
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


class _Burst:
    """Sends many messages, all of which are ready at once."""

    def __init__(self) -> None:
        self.sent = 0

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Echo/Burst": Handler(self._burst, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _burst(self, call: Call) -> None:
        await call.recv_message()
        for _ in range(MESSAGES):
            await call.send_message(b"0123456789")
            self.sent += 1


async def test_ready_messages_share_writes_and_other_tasks_run_after_sixteen() -> None:
    service = _Burst()
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

    async def watch() -> None:
        while True:
            seen.append(service.sent)
            await trio.lowlevel.checkpoint()

    async with memory_server(make_pair=pair, service=service) as (_, _, connect), trio.open_nursery() as nursery:
        peer = await connect().start()
        nursery.start_soon(watch)
        stream_id = await peer.request("Burst")
        trailers = await peer.trailers(stream_id)
        nursery.cancel_scope.cancel()
    assert trailers["grpc-status"] == "0"
    assert len(peer.body(stream_id)) == MESSAGES * 15
    # Tasks that are ready run in any order, so that two turns of one may lie between two of the other.
    assert max(late - early for early, late in pairwise(seen)) <= 2 * 16
    assert writes < MESSAGES / 4
