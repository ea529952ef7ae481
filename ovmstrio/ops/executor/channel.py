"""Input channel of an Op: a bounded priority queue of samples, oldest request first.

::

    enter() ──> blocked ──(room)──> waiting ──(slot)──> running ──> leave()
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

import trio

from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.observing.hooks import Span, Stage

_QUIET_SECONDS: Final = 0.01
"""Time without a new request after which a pipeline with room for more counts as stalled."""


class StallDetector:
    """Detector of a pipeline with ``room`` requests in which nothing moves, to flush partial batches."""

    def __init__(self, room: int) -> None:
        self._room = self._capacity = room
        self._moving = 0
        self._stalled = trio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_stalled(self) -> bool:
        """True if there are requests and none of them moves."""
        return not self._moving and self._room < self._capacity

    def when_stalled(self, callback: Callable[[], None]) -> None:
        """Register a callback for stalls."""
        self._callbacks.append(callback)

    async def watch(self) -> None:
        """Call the callbacks at each stall until cancelled."""
        while True:
            await self._stalled.wait()
            self._stalled = trio.Event()
            if self._room:
                with trio.move_on_after(_QUIET_SECONDS) as quiet:
                    await self._stalled.wait()
                if not quiet.cancelled_caught:
                    continue
            if self.is_stalled:
                for callback in self._callbacks:
                    callback()

    def enter(self) -> None:
        """Count a request that entered."""
        self._room -= 1
        self._moving += 1

    def leave(self) -> None:
        """Count a request that left."""
        self._room += 1
        self._moving -= 1
        if self._callbacks:
            self._notify_if_stalled()

    def go(self) -> None:
        """Count one more moving part of a request."""
        self._moving += 1

    def stop(self) -> None:
        """Count a part that ended or waits for a batch."""
        self._moving -= 1
        if self._callbacks:
            self._notify_if_stalled()

    def _notify_if_stalled(self) -> None:
        if self.is_stalled:
            self._stalled.set()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Input of an Op for one request: ids, and producer outputs by Op name."""

    data_id: int
    log_id: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an Op for one sample: an output or a failure."""

    output: dict[str, Any] | None = None
    failure: OpFailure | None = None
    jumps: bool = False


StageCallback = Callable[[Stage, Sequence[int], Span], None]
"""Callback with a stage, its data ids, and its begin and end times."""


class Worker(Protocol):
    """Worker for one batch at a time with a private copy of the Op; ``index`` is its number within the Op."""

    index: int

    @property
    def needs_recovery(self) -> bool:
        """True if :meth:`recover` must run before the next batch."""
        ...

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Process samples and return their results; after cancellation the worker may need to recover."""
        ...

    async def recover(self) -> None:
        """Make the worker usable again; raises ConfigError if it cannot be restarted."""
        ...


class _State(Enum):
    BLOCKED = auto()
    WAITING = auto()
    RUNNING = auto()
    LEFT = auto()


class Ticket:
    """Place of one sample in a channel."""

    __slots__ = ("_channel", "changed", "data_id", "state")

    def __init__(self, channel: Channel, data_id: int, state: _State = _State.BLOCKED) -> None:
        self._channel = channel
        self.data_id = data_id
        self.state = state
        self.changed: trio.Event | None = None

    @property
    def has_slot(self) -> bool:
        """True if the sample has a slot."""
        return self.state is _State.RUNNING

    async def wait_for_slot(self) -> None:
        """Wait for a slot; the ticket must be left even after cancellation."""
        while self.state is not _State.RUNNING:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until the state changes."""
        self.changed = trio.Event()
        await self.changed.wait()

    def leave(self) -> None:
        """Release the place; idempotent."""
        self._channel.leave(self)


class _Queue:
    def __init__(self, state: _State) -> None:
        self._state = state
        self._heap: list[tuple[int, int, Ticket]] = []
        self._numbers = itertools.count()
        self.count = 0

    def push(self, ticket: Ticket) -> None:
        ticket.state = self._state
        self.count += 1
        heapq.heappush(self._heap, (ticket.data_id, next(self._numbers), ticket))

    def pop(self) -> Ticket:
        while True:
            ticket = heapq.heappop(self._heap)[2]
            if ticket.state is self._state:
                self.count -= 1
                return ticket

    def remove_one(self) -> None:
        self.count -= 1
        if not self.count:
            self._heap.clear()


class Channel:
    """Input queue of one Op.

    Args:
        capacity: most samples that wait for a slot; 0 for no limit.
        slots: samples that the Op processes or collects for batches at the same time.
    """

    def __init__(self, capacity: int, slots: int) -> None:
        self.capacity = capacity
        self._free = slots
        self._blocked = _Queue(_State.BLOCKED)
        self._waiting = _Queue(_State.WAITING)

    @property
    def size(self) -> int:
        """Number of samples that wait for a slot."""
        return self._waiting.count

    def enter_now(self, data_id: int) -> Ticket | None:
        """Return a ticket with a slot if none waits for one, otherwise None; the caller must leave the ticket."""
        if not self._free or self._waiting.count or self._blocked.count:
            return None
        self._free -= 1
        return Ticket(self, data_id, _State.RUNNING)

    async def enter(self, data_id: int, *, is_forced: bool = False) -> Ticket:
        """Wait for room in the channel, or enter a full channel if forced; the caller must leave the ticket."""
        ticket = Ticket(self, data_id)
        (self._waiting if is_forced else self._blocked).push(ticket)
        self._advance()
        try:
            while ticket.state is _State.BLOCKED:
                await ticket.wait_for_change()
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Remove a sample in any state."""
        state, ticket.state = ticket.state, _State.LEFT
        if state is _State.RUNNING:
            self._free += 1
        elif state is _State.WAITING:
            self._waiting.remove_one()
        elif state is _State.BLOCKED:
            self._blocked.remove_one()
        if self._waiting.count or self._blocked.count:
            self._advance()

    def _advance(self) -> None:
        while True:
            if self._waiting.count and self._free:
                self._grant_slot(self._waiting.pop())
            elif self._blocked.count and self._has_room():
                ticket = self._blocked.pop()
                self._waiting.push(ticket)
                if ticket.changed is not None:
                    ticket.changed.set()
            else:
                return

    def _has_room(self) -> bool:
        return not self.capacity or self._waiting.count < self.capacity or self._free > 0

    def _grant_slot(self, ticket: Ticket) -> None:
        self._free -= 1
        ticket.state = _State.RUNNING
        if ticket.changed is not None:
            ticket.changed.set()
