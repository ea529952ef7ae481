"""Sending to clients that may be slow, or not read at all: every byte is counted, and no wait is endless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.pending_answers import PendingAnswers, current_share
from ovmstrio.wire.direct_stream import MOST_BUFFERS, DirectStream
from ovmstrio.wire.standstill import Standstill, unsent_bytes

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

__all__ = ["send_bounded"]

_PIECE_BYTES: Final = 64 * 1024
_UNCOUNTED: Final = PendingAnswers()


async def send_bounded(stream: trio.abc.SendStream, *buffers: Buffer) -> None:
    """Send everything, however slowly the peer takes it, as long as it takes something.

    If the socket does not take it all at once, it is counted in the share of the connection until it has.  Not a
    checkpoint if it does.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took nothing for as long as clients may.
        trio.ClosedResourceError: this end is closed, or its sending side.

    Cancellation: at any time; the stream is unusable then.
    """
    sent, size = 0, sum(map(len, buffers))
    if not size:
        return
    if isinstance(stream, DirectStream):
        sent = stream.send_now(*buffers[:MOST_BUFFERS])
        if sent == size:
            return
    share = current_share.get() or _UNCOUNTED.share()
    share.add(size)
    sending = _Sending(stream, share.answers)
    if size - sent > _PIECE_BYTES:
        share.answers.watched.add(sending)
    try:
        for view in [memoryview(each) for each in buffers]:
            if sent < len(view):
                await sending.send(view[sent:])
            sent = max(0, sent - len(view))
    finally:
        share.give_back(size)
        share.answers.watched.discard(sending)


class _Sending:
    """One answer, or a part of one, on its way to its client."""

    __slots__ = ("_answers", "_scope", "_standstill", "_stream")

    def __init__(self, stream: trio.abc.SendStream, answers: PendingAnswers) -> None:
        self._stream = stream
        self._answers = answers
        self._scope: trio.CancelScope | None = None
        self._standstill: Standstill | None = None

    async def send(self, view: memoryview) -> None:
        stream = self._stream
        while view:
            sent = stream.send_now(view) if isinstance(stream, DirectStream) else 0
            if not sent:
                sent = await self._send_piece(view[:_PIECE_BYTES])
            view = view[sent:]

    async def _send_piece(self, piece: memoryview) -> int:
        """Send some of it, or wait until that is possible; tells how much."""
        self._standstill = None
        with trio.move_on_after(self._answers.patience_seconds) as self._scope:
            if isinstance(self._stream, DirectStream):
                await self._stream.wait_send_all_might_not_block()
                return 0
            await self._stream.send_all(piece)
        if self._scope.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")
        return len(piece)

    def look(self, now: float, patience_seconds: float) -> None:
        """Let the client have its time from when it took something, of which its socket knows more than who sends."""
        if self._standstill is None:
            self._standstill = Standstill(now)
        if self._scope is not None:
            stood = self._standstill.seconds(unsent_bytes(self._stream), now)
            self._scope.deadline = now - stood + patience_seconds
