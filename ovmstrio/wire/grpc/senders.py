"""Messages that cannot be sent at once: who waits on one connection, for what, and who goes on first.

A message waits for its stream's window, and then in a queue for the connection's window and its writer.  Whatever
opens, one sender is woken, which sends and lets the next one go on: bytes of the peer never wake more senders than
they let send.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.pieced_message import PiecedMessage
from ovmstrio.wire.grpc.replies import Wakeup
from ovmstrio.wire.standstill import Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.pending_answers import PendingShare
    from ovmstrio.wire.grpc.core import Http2Core
    from ovmstrio.wire.grpc.events import StreamState

__all__ = ["Senders"]

_FEW: Final = 64
"""Entries of the heap that may be out of date whatever the number of those that are not."""


class _Message:
    """A message that is on its way: whose it is, how much is left, and for how long that has been the same."""

    __slots__ = ("left", "standstill", "stream")

    def __init__(self, stream: StreamState, size: int) -> None:
        self.stream = stream
        self.left = size
        self.standstill = Standstill(trio.current_time())


class Senders:
    """The senders of one connection that wait.

    Args:
        core: the connection's state.
        share: counts the bytes of their messages.
        high_water_bytes: of answers that may wait for the socket.
        mark_dirty: lets the writer send what waits in the core.

    Attributes:
        counted: bytes that wait in the core and are in the share still; whoever takes them says so.
    """

    def __init__(
        self, core: Http2Core, share: PendingShare, high_water_bytes: int, mark_dirty: Callable[[], None]
    ) -> None:
        self.counted = 0
        self._core = core
        self._share = share
        self._messages: dict[int, _Message] = {}
        self._high_water_bytes = high_water_bytes
        self._mark_dirty = mark_dirty
        self._queue = trio.lowlevel.ParkingLot()
        self._starved: dict[int, tuple[StreamState, Wakeup]] = {}
        self._by_credit: list[tuple[int, int]] = []

    async def send(self, stream: StreamState, prefix: bytes, message: bytes | memoryview | PiecedMessage) -> bool:
        """Send a message in pieces, as windows and the writer allow; False if the stream ended before.

        Cancellation: while it waits; a part of the message may have been sent.
        """
        pieces = iter(message.pieces if isinstance(message, PiecedMessage) else ((b"", memoryview(message)),))
        rest = memoryview(b"")
        left = len(prefix) + len(message)
        waiting = self._messages[stream.stream_id] = _Message(stream, left)
        self._share.add(left)
        try:
            while left:
                await self._turn(stream)
                if stream.local_closed:
                    return False
                while left and self._is_open() and (room := self._core.sendable(stream)) > 0:
                    if not rest:
                        before, rest = next(pieces, (b"", rest))
                        prefix += before
                    start, data = prefix[:room], rest[: max(0, room - len(prefix))]
                    self._core.send_data(stream, start, data)
                    prefix, rest = prefix[room:], rest[len(data) :]
                    left -= len(start) + len(data)
                self.counted += waiting.left - left
                waiting.left = left
                self._mark_dirty()
        finally:
            del self._messages[stream.stream_id]
            self._share.give_back(waiting.left)
            self.let_next()
        return True

    def stalled(self, now: float, patience_seconds: float) -> list[StreamState]:
        """Tell of which streams nothing has been sent for so long."""
        return [
            each.stream
            for each in self._messages.values()
            if each.standstill.seconds(each.left, now) >= patience_seconds
        ]

    def __len__(self) -> int:
        """Count the messages that wait."""
        return len(self._messages)

    def let_next(self) -> None:
        """Let the next sender go on that can, of the queue and of those whose own window was in the way."""
        if not self._is_open():
            return
        if self._queue:
            self._queue.unpark()
        # Those whose streams were granted most come first, whatever the peer's INITIAL_WINDOW_SIZE is.
        heap, initial = self._by_credit, self._core.windows.initial
        while heap and heap[0][0] < initial:
            _, stream_id = heappop(heap)
            if self.wake(stream_id):
                return

    def wake(self, stream_id: int) -> bool:
        """Let the sender of one stream go on, whose window has opened; False if none waits for it."""
        starved = self._starved.pop(stream_id, None)
        if starved is None:
            return False
        starved[0].is_starved = False
        starved[1].wake()
        return True

    def _is_open(self) -> bool:
        return self._core.windows.connection > 0 and self._core.waiting_bytes < self._high_water_bytes

    async def _turn(self, stream: StreamState) -> None:
        """Wait until bytes of a stream may be sent, or it is over."""
        windows = self._core.windows
        while not stream.local_closed:
            if windows.of(stream) <= 0:
                await self._wait_for_window(stream)
            elif not self._is_open():
                await self._queue.park()
            else:
                return

    async def _wait_for_window(self, stream: StreamState) -> None:
        self.let_next()
        wakeup = Wakeup()
        self._starved[stream.stream_id] = stream, wakeup
        stream.is_starved = True
        if len(self._by_credit) > 2 * len(self._starved) + _FEW:
            self._by_credit = [(-each.credit, number) for number, (each, _) in self._starved.items()]
            heapify(self._by_credit)
        else:
            heappush(self._by_credit, (-stream.credit, stream.stream_id))
        try:
            await wakeup.wait()
        finally:
            stream.is_starved = False
            self._starved.pop(stream.stream_id, None)
