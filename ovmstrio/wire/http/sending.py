"""Sending with a bound: a peer that takes nothing for too long is given up."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.http import BODILESS
from ovmstrio.wire.http.answers import answer_head

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer
    from ovmstrio.core.request import Buffer

__all__ = ["STALLED_SECONDS", "send_answer", "send_bounded"]

STALLED_SECONDS: Final = 60.0
"""How long a peer may take nothing of an answer."""

_PIECE_BYTES: Final = 64 * 1024


async def send_bounded(stream: trio.abc.SendStream, data: Buffer) -> None:
    """Send everything, however slowly the peer takes it, as long as it takes something.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took no piece for :data:`STALLED_SECONDS`.

    Cancellation: at any time; the stream is unusable then.
    """
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        with trio.move_on_after(STALLED_SECONDS) as patience:
            await stream.send_all(view[start : start + _PIECE_BYTES])
        if patience.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")


async def send_answer(stream: trio.abc.SendStream, answer: HttpAnswer, *, keep_alive: bool) -> None:
    """Send an answer, a whole one in one piece; what a stream gives is sent as it comes, and the stream is closed.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took nothing for too long.
            A stream that fails raises it, too: its answer breaks off.

    Cancellation: at any time; the connection is unusable then.
    """
    status, body = answer.status, answer.body
    is_bodiless = status in BODILESS
    if isinstance(body, bytes):
        length = None if is_bodiless else len(body)
        head = answer_head(status, answer.headers, length=length, is_chunked=False, keep_alive=keep_alive)
        await send_bounded(stream, head if is_bodiless else head + body)
        return
    head = answer_head(status, answer.headers, length=None, is_chunked=not is_bodiless, keep_alive=keep_alive)
    async with aclosing(body):
        await send_bounded(stream, head)
        if is_bodiless:
            return
        async for piece in body:
            if piece:
                await send_bounded(stream, b"%x\r\n%b\r\n" % (len(piece), piece))
    await send_bounded(stream, b"0\r\n\r\n")
