"""Streams of answers that are held for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from ovmstrio.api.handlers.http.held_stream import HeldStream
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import Unauthenticated
from ovmstrio.core.long_requests import LongRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    """Give pieces, and then wait for one that never comes."""
    for piece in pieces:
        yield piece
    await trio.sleep_forever()


async def test_an_answer_that_waits_for_its_next_piece_breaks_off_at_once() -> None:
    """When it is not known any more who asks, and not when that piece has come."""
    request = LongRequest(Caller("shop", "key", Scopes()), (), None)
    ended: list[str] = []
    stream = HeldStream(_pieces(b"a", b"b"), known=(request, lambda: ended.append("known")))  # type: ignore[arg-type]
    came: list[bytes] = []

    async def take_all() -> None:
        while True:
            came.append(await anext(stream))

    async def read() -> None:
        with pytest.raises(trio.BrokenResourceError, match="the key is not known"):
            await take_all()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            request.end(Unauthenticated("the key is not known"))
        with pytest.raises(trio.BrokenResourceError):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
    assert came == [b"a", b"b"]
    assert ended == ["known"]
