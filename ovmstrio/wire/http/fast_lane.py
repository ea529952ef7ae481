"""The short way over HTTP/1.1: read the request, have it answered, write the answer, without any framework.

Only plain requests (:mod:`ovmstrio.wire.http.lane_head`) that the lane's routes take go this way.  At the first
request that is anything else, the connection leaves the lane for good, with every byte that has been read, so that all
judging of odd input is done by one careful parser.

::

    socket ─> reader task ─> buffer ─> head, body ─> what the routes chose ─> socket
                 │ end of stream: the call in progress is cancelled

A client that closes its sending side while it waits cannot be told from one that is gone; its call is cancelled.  A
request that was complete before that is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import trio

from ovmstrio.wire.http.lane_answers import LaneAnswer, send_answer
from ovmstrio.wire.http.lane_head import MAX_HEAD_BYTES, Head, read_head

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["FastLane", "LaneRoutes"]

MAX_WAITING_BYTES: Final = 64 * 1024
"""Bytes of later, pipelined requests that may wait while one is answered."""

IDLE_SECONDS: Final = 75.0
HEAD_SECONDS: Final = 30.0
"""Time that a head may take from its first byte to its last."""
RECEIVE_SECONDS: Final = 30.0
"""Time that may pass between two pieces of a body."""


class LaneRoutes(Protocol):
    """Chooses which requests the lane takes, and what answers them.

    ``prefixes`` are what a request must begin with, so that others leave before their head is complete.  What
    :meth:`route` gives is called with the body; it turns every failure into an answer.
    """

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """The first bytes of requests that may be for the lane."""
        ...

    def route(self, head: Head) -> Callable[[bytes], Awaitable[LaneAnswer]] | None:
        """Find what answers a request; None for one that is the application's."""
        ...


class FastLane:
    """One connection for as long as it stays in the lane.

    Args:
        routes: which requests it takes, and what answers them.
        stream: the connection, which stays the caller's.
        max_body_bytes: larger bodies leave the lane.
    """

    def __init__(self, routes: LaneRoutes, stream: trio.abc.Stream, max_body_bytes: int) -> None:
        self._routes = routes
        self._stream = stream
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._wanted = 0
        self._ended = False
        self._draining = False
        self._idle = True
        self._arrived = trio.Event()
        self._room = trio.Event()
        self._lane: trio.CancelScope | None = None
        self._call: trio.CancelScope | None = None

    async def run(self) -> bytes | None:
        """Answer requests until the connection is over; the bytes of a request that is not for the lane are given.

        Raises:
            trio.BrokenResourceError: the connection broke while an answer was sent.

        Cancellation: at any checkpoint; a call in progress is cancelled with it.
        """
        leaves = False
        async with trio.open_nursery() as nursery:
            self._lane = nursery.cancel_scope
            nursery.start_soon(self._read)
            leaves = await self._serve()
            nursery.cancel_scope.cancel()
        # Only now: the reader may have held bytes when it was told to end, and has put them into the buffer since.
        return bytes(self._buffer) if leaves else None

    def drain(self) -> None:
        """Close the connection after the answer in progress, at once if there is none."""
        self._draining = True
        if self._idle and self._lane is not None:
            self._lane.cancel()

    # Reading

    async def _read(self) -> None:
        while not self._ended:
            if len(self._buffer) >= max(self._wanted, MAX_WAITING_BYTES):
                self._room = trio.Event()
                await self._room.wait()
                continue
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            self._buffer += data
            self._ended = not data
            self._arrived.set()
        if self._call is not None:
            self._call.cancel()

    async def _more(self, deadline: float) -> bool:
        """Wait for bytes; False when there will be none."""
        if self._ended:
            return False
        known = len(self._buffer)
        self._set_deadline(deadline)
        self._arrived = trio.Event()
        self._room.set()
        await self._arrived.wait()
        return len(self._buffer) > known

    # Serving

    async def _serve(self) -> bool:
        """Answer until the connection is over (False) or leaves the lane (True)."""
        while True:
            self._idle = not self._buffer
            if self._idle and self._draining:
                return False
            if not self._buffer and not await self._more(trio.current_time() + IDLE_SECONDS):
                return False
            self._idle = False
            found = await self._head()
            if found is None:
                return True
            head, call = found
            body = await self._body(head.body_length)
            if body is None or not await self._answer(call, body, keep_alive=head.keep_alive):
                return False

    async def _head(self) -> tuple[Head, Callable[[bytes], Awaitable[LaneAnswer]]] | None:
        """Take the head off the buffer; None, with the buffer as it is, for a request that is not for the lane."""
        buffer = self._buffer
        deadline = trio.current_time() + HEAD_SECONDS
        while True:
            if not buffer.startswith(tuple(prefix[: len(buffer)] for prefix in self._routes.prefixes)):
                return None
            end = buffer.find(b"\r\n\r\n")
            if end >= 0:
                break
            if len(buffer) > MAX_HEAD_BYTES or not await self._more(deadline):
                return None
        head = read_head(bytes(buffer[: end + 4])) if end <= MAX_HEAD_BYTES else None
        if head is None or head.body_length > self._max_body_bytes:
            return None
        call = self._routes.route(head)
        if call is None:
            return None
        del buffer[: end + 4]
        return head, call

    async def _body(self, length: int) -> bytes | None:
        self._wanted = length
        while len(self._buffer) < length:
            if not await self._more(trio.current_time() + RECEIVE_SECONDS):
                return None
        self._wanted = 0
        body = bytes(self._buffer) if len(self._buffer) == length else bytes(self._buffer[:length])
        del self._buffer[:length]
        self._room.set()
        return body

    async def _answer(self, call: Callable[[bytes], Awaitable[LaneAnswer]], body: bytes, *, keep_alive: bool) -> bool:
        """Answer a request; False if the connection ends with it.

        A stream of an answer ends with its client, as the call does that has not been answered.
        """
        self._set_deadline(float("inf"))
        answer = None
        try:
            with trio.CancelScope() as self._call:
                answer = await call(body)
                keep_alive = keep_alive and not self._draining
                if not isinstance(answer.body, bytes):
                    await send_answer(self._stream, answer, keep_alive=keep_alive)
            gone = self._call.cancelled_caught
            self._call = None
            if gone or answer is None:
                return False
            if isinstance(answer.body, bytes):
                await send_answer(self._stream, answer, keep_alive=keep_alive)
        finally:
            if answer is not None and answer.after is not None:
                answer.after()
        return keep_alive

    def _set_deadline(self, deadline: float) -> None:
        if self._lane is not None:
            self._lane.deadline = deadline
