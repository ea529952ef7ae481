"""Large messages that are sent from where their pieces lie."""

from __future__ import annotations

import trio
import trio.testing
from grpclib.const import Cardinality, Handler
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.grpc import Call, GrpcServer, TransportLimits
from tests.support.examples import examples
from tests.unit.wire.grpc.bytes_client import message
from tests.unit.wire.grpc.echo import BytesCodec
from tests.unit.wire.grpc.peers import MemoryListener, Peer

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
        """Give the handler by its path."""
        return {"/test.Echo/Parts": Handler(self._answer, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _answer(self, call: Call) -> None:
        await call.recv_message()
        for _ in range(2):
            await call.send_message(PiecedMessage(self.parts))


async def _received(parts: list[bytes | memoryview], grants: list[int]) -> tuple[bytes, str]:
    """Give what a peer receives that opens its windows by so many bytes in turn."""
    listener = MemoryListener(trio.testing.memory_stream_pair)
    server = GrpcServer([_Parts(parts)], BytesCodec(), limits=TransportLimits.for_test())
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [listener])
        peer = await Peer(listener.connect()).start()
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
        nursery.cancel_scope.cancel()
    return peer.body(call), status


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(sizes, max_size=6), st.lists(st.integers(5_000, 200_000), min_size=1, max_size=4))
def test_a_message_in_pieces_arrives_as_if_it_had_been_joined(lengths: list[int], grants: list[int]) -> None:
    """Whatever the pieces are, and however the client's windows open."""
    parts = [_part(number, size) for number, size in enumerate(lengths)]
    whole = b"".join(parts)
    assert len(PiecedMessage(parts)) == len(whole)
    assert trio.run(_received, parts, grants) == (message(whole) * 2, "0")


def test_large_pieces_are_not_copied() -> None:
    """Small ones are joined to what stands before the next large one."""
    large, other = bytearray(LARGE), bytearray(LARGE)
    pieces = PiecedMessage([b"ab", b"c", memoryview(large), memoryview(other), b"d", memoryview(b"e")]).pieces
    assert [before for before, _ in pieces] == [b"abc", b"", b"de"]
    assert [piece.obj is array for (_, piece), array in zip(pieces, (large, other), strict=False)] == [True, True]
    assert not pieces[2][1]
