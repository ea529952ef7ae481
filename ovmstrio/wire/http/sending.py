"""Sending with a bound: a peer that takes nothing for too long is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

__all__ = ["STALLED_SECONDS", "send_bounded"]

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
