"""Many small messages of one call: they share writes, and leave others their turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import trio
import trio.testing
from grpclib.const import Cardinality, Handler

from ovmstrio.wire.grpc import Call, GrpcServer, TransportLimits
from tests.unit.wire.grpc.echo import BytesCodec
from tests.unit.wire.grpc.peers import MemoryListener, Peer

MESSAGES = 320


class _Burst:
    """Sends many messages, all of which are ready at once."""

    def __init__(self) -> None:
        self.sent = 0

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handler by its path."""
        return {"/test.Echo/Burst": Handler(self._burst, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _burst(self, call: Call) -> None:
        await call.recv_message()
        for _ in range(MESSAGES):
            await call.send_message(b"0123456789")
            self.sent += 1


async def test_messages_that_are_ready_share_writes_and_leave_others_their_turns() -> None:
    """Another task gets its turn between every sixteen messages, and a write carries about as many."""
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

    listener = MemoryListener(pair)
    server = GrpcServer([service], BytesCodec(), limits=TransportLimits.for_test())
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [listener])
        peer = await Peer(listener.connect()).start()
        nursery.start_soon(watch)
        stream_id = await peer.request("Burst")
        trailers = await peer.trailers(stream_id)
        nursery.cancel_scope.cancel()

    assert trailers["grpc-status"] == "0"
    assert len(peer.body(stream_id)) == MESSAGES * 15
    # Tasks that are ready run in any order, so that two turns of one may lie between two of the other.
    assert max(late - early for early, late in pairwise(seen)) <= 2 * 16
    assert writes < MESSAGES / 4
