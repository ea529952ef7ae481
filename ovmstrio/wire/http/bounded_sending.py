"""Sending to clients that may be slow, or not read at all: every byte is counted, and no wait is endless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.pending_answers import PendingAnswers, current_share
from ovmstrio.wire.standstill import Standstill, unsent_bytes

if TYPE_CHECKING:
    from ovmstrio.core.pending_answers import PendingShare
    from ovmstrio.core.request import Buffer

__all__ = ["send_bounded"]

_PIECE_BYTES: Final = 64 * 1024
_UNCOUNTED: Final = PendingAnswers()


async def send_bounded(stream: trio.abc.SendStream, data: Buffer) -> None:
    """Send everything, however slowly the peer takes it, as long as it takes something.

    Until it has been taken, it is counted in the share of the connection.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took nothing for as long as clients may.

    Cancellation: at any time; the stream is unusable then.
    """
    share = current_share.get() or _UNCOUNTED.share()
    size = len(memoryview(data))
    share.add(size)
    if size <= _PIECE_BYTES:
        try:
            with trio.move_on_after(share.answers.patience_seconds) as patience:
                await stream.send_all(data)
        finally:
            share.give_back(size)
        if patience.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")
        return
    await _send_pieces(stream, memoryview(data), share)


async def _send_pieces(stream: trio.abc.SendStream, view: memoryview, share: PendingShare) -> None:
    """Send what is much, while somebody looks how it goes; it is counted in the share already."""
    size = len(view)
    sending = _Sending(stream)
    share.answers.watched.add(sending)
    try:
        for start in range(0, size, _PIECE_BYTES):
            await sending.send(view[start : start + _PIECE_BYTES], share.answers.patience_seconds)
    finally:
        share.give_back(size)
        share.answers.watched.discard(sending)


class _Sending:
    """One answer, or a part of one, on its way to its client."""

    __slots__ = ("_scope", "_standstill", "_stream")

    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream = stream
        self._scope: trio.CancelScope | None = None
        self._standstill: Standstill | None = None

    async def send(self, piece: memoryview, patience_seconds: float) -> None:
        self._standstill = None
        with trio.move_on_after(patience_seconds) as self._scope:
            await self._stream.send_all(piece)
        if self._scope.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")

    def look(self, now: float, patience_seconds: float) -> None:
        """Let the client have its time from when it took something, of which its socket knows more than who sends."""
        if self._standstill is None:
            self._standstill = Standstill(now)
        if self._scope is not None:
            stood = self._standstill.seconds(unsent_bytes(self._stream), now)
            self._scope.deadline = now - stood + patience_seconds
