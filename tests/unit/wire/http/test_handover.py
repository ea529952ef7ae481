"""A connection that leaves the lane takes every byte with it, those included that arrive at that very moment."""

from __future__ import annotations

from pathlib import Path

import trio

from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.fast_lane import FastLane
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import stack


class _InTwoPieces(trio.abc.Stream):
    """Gives one piece and, having taken the next off the wire, is at a checkpoint with it, as sockets are."""

    def __init__(self, first: bytes, second: bytes) -> None:
        self.pieces = [first, second]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Give the next piece."""
        if not self.pieces:
            await trio.sleep_forever()
        piece = self.pieces.pop(0)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return piece

    async def send_all(self, data: object) -> None:
        """Take nothing."""
        raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        """Take nothing."""
        raise trio.BrokenResourceError

    async def aclose(self) -> None:
        """Hold nothing."""
        await trio.lowlevel.checkpoint()


async def test_bytes_that_the_reader_holds_are_handed_over(tmp_path: Path) -> None:
    """The reader may be told to end between taking bytes from the socket and keeping them."""
    async with stack(tmp_path) as (plane, _, _):
        for _ in range(50):
            stream = _InTwoPieces(b"HEAD /v2 HTTP/1.1\r\n", b"Host: h\r\n\r\n")
            with trio.fail_after(WAIT_SECONDS):
                left = await FastLane(make_router(plane), stream, 1000).run()
            assert left is not None
            taken = b"HEAD /v2 HTTP/1.1\r\n" + (b"" if stream.pieces else b"Host: h\r\n\r\n")
            assert left == taken
