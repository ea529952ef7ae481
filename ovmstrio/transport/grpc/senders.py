"""Senders of a server's or client's connection that wait for its HTTP/2 window."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

import trio

from ovmstrio.transport.grpc.http2 import Http2Core, StreamState
from ovmstrio.transport.send_budget import ConnectionBudget, ProgressTimer
from ovmstrio.util.buffers import PiecedMessage


class Wakeup:
    """Wait point of one task.

    ``wake`` without a waiter has no effect. The waiter must check its condition before and after ``wait``, without a
    checkpoint between check and wait.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def waiting(self) -> bool:
        """True if a task is waiting."""
        return self._task is not None

    async def wait(self) -> None:
        """Wait for the next ``wake``; raises ``BusyResourceError`` if another task is waiting."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is already waiting")
        self._task = trio.lowlevel.current_task()

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def wake(self) -> None:
        """Wake the waiting task, if any."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)


_MAX_STALE_ENTRIES: Final = 64
"""Stale heap entries that are allowed in addition to one per waiting sender."""


class _Message:
    __slots__ = ("left", "standstill", "stream")

    def __init__(self, stream: StreamState, size: int) -> None:
        self.stream = stream
        self.left = size
        self.standstill = ProgressTimer(trio.current_time())


class BlockedSenders:
    """Senders of one connection that wait for flow-control windows or for the writer.

    ``counted`` is the number of bytes queued in the core that the share still counts; the writer resets it.
    """

    def __init__(
        self, core: Http2Core, share: ConnectionBudget, high_water_bytes: int, wake_writer: Callable[[], None]
    ) -> None:
        self.counted = 0
        self._core = core
        self._share = share
        self._messages: dict[int, _Message] = {}
        self._high_water_bytes = high_water_bytes
        self._mark_dirty = wake_writer
        self._queue = trio.lowlevel.ParkingLot()
        self._starved: dict[int, tuple[StreamState, Wakeup]] = {}
        self._by_credit: list[tuple[int, int]] = []

    async def send(self, stream: StreamState, prefix: bytes, message: bytes | memoryview | PiecedMessage) -> bool:
        """Send a message in pieces, as windows and writer allow; return False if the stream ended first."""
        pieces = iter(message.pieces if isinstance(message, PiecedMessage) else ((b"", memoryview(message)),))
        rest = memoryview(b"")
        left = len(prefix) + len(message)
        waiting = self._messages[stream.stream_id] = _Message(stream, left)
        self._share.add(left)
        try:
            while left:
                await self._turn(stream)
                if stream.is_local_closed:
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
            self._share.release(waiting.left)
            self.wake_next()
        return True

    def stalled_streams(self, now: float, stall_timeout_seconds: float) -> list[StreamState]:
        """Return the streams on which nothing was sent for ``stall_timeout_seconds``."""
        return [
            each.stream
            for each in self._messages.values()
            if each.standstill.seconds(each.left, now) >= stall_timeout_seconds
        ]

    def __len__(self) -> int:
        """Return the number of waiting messages."""
        return len(self._messages)

    def wake_next(self) -> None:
        """Wake the next sender of the queue, and the next one whose stream window has opened."""
        if not self._is_open():
            return
        if self._queue:
            self._queue.unpark()
        # Streams with the largest credit come first, whatever the peer's INITIAL_WINDOW_SIZE is.
        heap, initial = self._by_credit, self._core.windows.initial
        while heap and heap[0][0] < initial:
            _, stream_id = heappop(heap)
            if self.wake(stream_id):
                return

    def wake(self, stream_id: int) -> bool:
        """Wake the sender of a stream whose window has opened; return False if there is none."""
        starved = self._starved.pop(stream_id, None)
        if starved is None:
            return False
        starved[0].is_starved = False
        starved[1].wake()
        return True

    def _is_open(self) -> bool:
        return self._core.windows.connection > 0 and self._core.unsent_bytes < self._high_water_bytes

    async def _turn(self, stream: StreamState) -> None:
        """Wait until bytes of a stream may be sent, or the stream has ended."""
        windows = self._core.windows
        while not stream.is_local_closed:
            if windows.of(stream) <= 0:
                await self._wait_for_window(stream)
            elif not self._is_open():
                await self._queue.park()
            else:
                return

    async def _wait_for_window(self, stream: StreamState) -> None:
        self.wake_next()
        wakeup = Wakeup()
        self._starved[stream.stream_id] = stream, wakeup
        stream.is_starved = True
        if len(self._by_credit) > 2 * len(self._starved) + _MAX_STALE_ENTRIES:
            self._by_credit = [(-each.credit, number) for number, (each, _) in self._starved.items()]
            heapify(self._by_credit)
        else:
            heappush(self._by_credit, (-stream.credit, stream.stream_id))
        try:
            await wakeup.wait()
        finally:
            stream.is_starved = False
            self._starved.pop(stream.stream_id, None)
