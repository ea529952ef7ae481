"""Sending of responses with stall detection."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.http_messages import COMPLETE_BODY_TYPES, STATUSES_WITHOUT_BODY
from ovmstrio.transport.direct_stream import MAX_WRITEV_BUFFERS, DirectStream
from ovmstrio.transport.http.responses import encode_response_head
from ovmstrio.transport.send_budget import ProgressTimer, SendBudget, current_connection_budget, unsent_bytes
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from typing import Self

    from ovmstrio.core.http_messages import HttpAnswer
    from ovmstrio.core.request import Buffer

# -- Sending -----------------------------------------------------------------------------------------------------------

_PIECE_BYTES: Final = 64 * 1024
_UNLIMITED: Final = SendBudget()


async def send_bounded(stream: trio.abc.SendStream, *buffers: Buffer) -> None:
    """Send all buffers, as long as the peer reads at all; raises ``BrokenResourceError`` if it has stalled.

    Bytes that the socket does not take at once count in the send budget of the connection. Not a checkpoint if the
    socket takes all. The stream is unusable after a cancellation.
    """
    sent, size = 0, sum(map(len, buffers))
    if not size:
        return
    if isinstance(stream, DirectStream):
        sent = stream.send_now(*buffers[:MAX_WRITEV_BUFFERS])
        if sent == size:
            return
    share = current_connection_budget.get() or _UNLIMITED.share()
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
        share.release(size)
        share.answers.watched.discard(sending)


class _Sending:
    __slots__ = ("_answers", "_scope", "_standstill", "_stream")

    def __init__(self, stream: trio.abc.SendStream, answers: SendBudget) -> None:
        self._stream = stream
        self._answers = answers
        self._scope: trio.CancelScope | None = None
        self._standstill: ProgressTimer | None = None

    async def send(self, view: memoryview) -> None:
        stream = self._stream
        while view:
            sent = stream.send_now(view) if isinstance(stream, DirectStream) else 0
            if not sent:
                sent = await self._send_piece(view[:_PIECE_BYTES])
            view = view[sent:]

    async def _send_piece(self, piece: memoryview) -> int:
        """Send some bytes, or wait until that is possible; return how many were sent."""
        self._standstill = None
        with trio.move_on_after(self._answers.stall_timeout_seconds) as self._scope:
            if isinstance(self._stream, DirectStream):
                await self._stream.wait_send_all_might_not_block()
                return 0
            await self._stream.send_all(piece)
        if self._scope.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")
        return len(piece)

    def look(self, now: float, stall_timeout_seconds: float) -> None:
        """Extend the deadline from the client's last progress, as seen in the socket's send buffer."""
        if self._standstill is None:
            self._standstill = ProgressTimer(now)
        if self._scope is not None:
            stalled_seconds = self._standstill.seconds(unsent_bytes(self._stream), now)
            self._scope.deadline = now - stalled_seconds + stall_timeout_seconds


# -- Pushed bodies -----------------------------------------------------------------------------------------------------


class _FramedBytes(bytes):
    """Rest of a chunk that begins with a part of the chunk's framing or data."""

    __slots__ = ()


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class PushedBody:
    """Response body whose producer writes to the socket itself, which saves a task switch per piece.

    Pieces pass through a channel to the sending task before the response head is sent, over transports other than a
    :class:`DirectStream`, and while the socket is full.

    Attributes:
        is_incomplete: the end of the body raises, so that clients detect the truncation.
    """

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[bytes](0)
        self._stream: DirectStream | None = None
        self._passed_pieces = 0
        self._sent_pieces = 0
        self._has_piece = False
        self.is_incomplete = False

    def attach(self, stream: DirectStream) -> None:
        """Set the stream, after the response head was sent on it."""
        self._stream = stream

    @property
    def can_write(self) -> bool:
        """True if :meth:`write` may be called: the sending task waits and has sent all earlier pieces."""
        return self._stream is not None and self._passed_pieces == self._sent_pieces

    def write(self, piece: bytes) -> None:
        """Write a piece; the sending task sends what the socket does not take at once.

        Raises ``BrokenResourceError``, ``ClosedResourceError`` or ``WouldBlock`` if the connection is closed.
        """
        if piece and self._stream is not None:
            chunk = _chunk(piece)
            sent = self._stream.send_now(chunk)
            if sent < len(chunk):
                self._passed_pieces += 1
                self._send.send_nowait(_FramedBytes(chunk[sent:]))

    async def send(self, piece: bytes) -> None:
        """Pass a piece to the sending task; a checkpoint only if that task is not waiting for it.

        Raises ``BrokenResourceError`` if the body was closed.
        """
        self._passed_pieces += 1
        try:
            try:
                self._send.send_nowait(piece)
            except trio.WouldBlock:
                await self._send.send(piece)
        except BaseException:
            self._passed_pieces -= 1
            raise

    def close(self) -> None:
        """End the body."""
        self._send.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._has_piece:
            self._has_piece = False
            self._sent_pieces += 1
        try:
            piece = await self._receive.receive()
        except trio.EndOfChannel:
            if self.is_incomplete:
                raise trio.BrokenResourceError("response aborted") from None
            raise StopAsyncIteration from None
        self._has_piece = True
        return piece

    async def aclose(self) -> None:
        """Refuse further pieces."""
        self._stream = None
        await self._receive.aclose()


# -- Responses ---------------------------------------------------------------------------------------------------------

_JOINED_BYTES: Final = 2**16
"""Maximum size of a body that is copied to its head, so that both are sent in one call."""


async def send_response(stream: trio.abc.SendStream, answer: HttpAnswer, *, keep_alive: bool) -> None:
    """Send a response: a complete body at once, a stream in chunks; closes the stream.

    Raises ``BrokenResourceError`` if the connection broke, the peer has stalled, or the response stream failed. The
    connection is unusable after a cancellation.
    """
    status, body = answer.status, answer.body
    is_bodiless = status in STATUSES_WITHOUT_BODY
    if isinstance(body, COMPLETE_BODY_TYPES):
        length = None if is_bodiless else len(body)
        head = encode_response_head(status, answer.headers, length=length, is_chunked=False, keep_alive=keep_alive)
        if is_bodiless:
            await send_bounded(stream, head)
        elif isinstance(body, PiecedMessage):
            await send_bounded(stream, head, *body.buffers())
        elif len(body) > _JOINED_BYTES:
            await send_bounded(stream, head, body)
        else:
            await send_bounded(stream, head + body)
        return
    head = encode_response_head(status, answer.headers, length=None, is_chunked=not is_bodiless, keep_alive=keep_alive)
    async with aclosing(body):
        await send_bounded(stream, head)
        if is_bodiless:
            return
        if isinstance(body, PushedBody) and isinstance(stream, DirectStream):
            body.attach(stream)
        async for piece in body:
            if piece:
                await send_bounded(stream, piece if isinstance(piece, _FramedBytes) else _chunk(piece))
    await send_bounded(stream, b"0\r\n\r\n")
