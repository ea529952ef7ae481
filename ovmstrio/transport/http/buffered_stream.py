"""Connections with every wait bounded: sending, and handing one that has been read from to hypercorn."""

from __future__ import annotations

import math
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.http import BODILESS, WHOLE_BODIES
from ovmstrio.transport.direct_stream import LINGER_SECONDS, MOST_BUFFERS, DirectStream, transport_of
from ovmstrio.transport.http.responses import answer_head
from ovmstrio.transport.send_budget import PendingAnswers, current_share
from ovmstrio.transport.stall_detector import Standstill, unsent_bytes
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer
    from ovmstrio.core.request import Buffer

__all__ = ["PrefixedStream", "send_answer", "send_bounded"]

# ----------------------------------------------------------------------
# Sending to clients that may be slow, or not read at all: every byte is counted, and no wait is endless
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Connections with every wait bounded: sending, and handing one that has been read from to hypercorn
# ----------------------------------------------------------------------

_JOINED_BYTES: Final = 2**16
"""Of a body that is copied behind its head, so that both go at once whatever there is below."""


async def send_answer(stream: trio.abc.SendStream, answer: HttpAnswer, *, keep_alive: bool) -> None:
    """Send an answer, a whole one in one piece; what a stream gives is sent as it comes, and the stream is closed.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took nothing for too long.
            A stream that fails raises it, too: its answer breaks off.

    Cancellation: at any time; the connection is unusable then.
    """
    status, body = answer.status, answer.body
    is_bodiless = status in BODILESS
    if isinstance(body, WHOLE_BODIES):
        length = None if is_bodiless else len(body)
        head = answer_head(status, answer.headers, length=length, is_chunked=False, keep_alive=keep_alive)
        if is_bodiless:
            await send_bounded(stream, head)
        elif isinstance(body, PiecedMessage):
            await send_bounded(stream, head, *body.buffers())
        elif len(body) > _JOINED_BYTES:
            await send_bounded(stream, head, body)
        else:
            await send_bounded(stream, head + body)
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


CLOSE_SECONDS: Final = 1.0


class PrefixedStream:
    """A stream whose first bytes have been read already, with what hypercorn uses of one.

    Attributes:
        is_finished: whether nothing more is sent, and what comes is dropped.
    """

    def __init__(self, stream: trio.abc.Stream, prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self.is_finished = False
        self._reading: trio.CancelScope | None = None
        self._read_until = math.inf

    @property
    def encrypted(self) -> bool:
        """Whether there is TLS between the client and this."""
        return isinstance(self._stream, trio.SSLStream)

    @property
    def transport(self) -> Any:
        """The stream below TLS, which has a socket."""
        return transport_of(self._stream)

    def read_until(self, deadline: float) -> None:
        """Wait for bytes until then, on trio's clock, be it in a read that waits already; not of a finished stream."""
        if not self.is_finished:
            self._read_until = deadline
            if self._reading is not None:
                self._reading.deadline = deadline

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Give the bytes that were read before, and then what comes; none once finished.

        Raises:
            trio.TooSlowError: nothing has come in time.
            trio.BrokenResourceError: the connection broke.

        Cancellation: at any time; no bytes are lost.
        """
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            await trio.lowlevel.checkpoint()
            return prefix
        with trio.CancelScope(deadline=self._read_until) as self._reading:
            data = bytes(await self._stream.receive_some(max_bytes))
            while data and self.is_finished:
                data = bytes(await self._stream.receive_some(max_bytes))
            return data
        if self.is_finished:
            return b""
        raise trio.TooSlowError

    async def send_all(self, data: Buffer) -> None:
        """Send everything.

        Raises:
            trio.BrokenResourceError: the connection broke, or the client stopped reading.

        Cancellation: at any time; the connection is unusable then.
        """
        await send_bounded(self._stream, data)

    async def send_eof(self) -> None:
        """Close the sending side, below TLS if there is any.

        Raises:
            trio.BrokenResourceError: the connection broke.

        Cancellation: at once.
        """
        await self.transport.send_eof()

    async def finish(self) -> None:
        """Send nothing any more, and drop what still comes, for a while.

        Closing at once, with bytes unread, would tell the client that the connection broke, and it might never see
        the answer that says why.

        Cancellation: at once.
        """
        self.read_until(trio.current_time() + LINGER_SECONDS)
        self.is_finished = True
        with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
            await self.send_eof()

    async def aclose(self) -> None:
        """Close the connection, even if the client does not take TLS's goodbye.

        Cancellation: closes it all the same.
        """
        with trio.move_on_after(CLOSE_SECONDS):
            await self._stream.aclose()
