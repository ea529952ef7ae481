"""The way into one Op: samples wait in it, as many as it holds, until there is a seat, the oldest request first.

::

    enter() ──> blocked ──(room)──> waiting ──(seat)──> seated ──> leave()
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

__all__ = ["Channel", "ReportStage", "Result", "Sample", "StallDetector", "Ticket", "Worker"]


_QUIET_SECONDS: Final = 0.01
"""How long requests have to wait that none comes any more, where there is room for more of them."""


class StallDetector:
    """Counts what moves.

    Args:
        room: how many requests the pipeline has room for.
    """

    def __init__(self, room: int) -> None:
        self._room = self._capacity = room
        self._moving = 0
        self._stalled = trio.Event()
        self._remedies: list[Callable[[], None]] = []

    @property
    def is_stalled(self) -> bool:
        """Whether there are requests and none of them moves."""
        return not self._moving and self._room < self._capacity

    def when_stalled(self, remedy: Callable[[], None]) -> None:
        """Have something called when nothing moves."""
        self._remedies.append(remedy)

    async def watch(self) -> None:
        """Apply the remedies whenever nothing moves, until cancelled.

        Cancellation: at once.
        """
        while True:
            await self._stalled.wait()
            self._stalled = trio.Event()
            if self._room:
                with trio.move_on_after(_QUIET_SECONDS) as quiet:
                    await self._stalled.wait()
                if not quiet.cancelled_caught:
                    continue
            if self.is_stalled:
                for remedy in self._remedies:
                    remedy()

    def enter(self) -> None:
        """Note that a request has come in, and moves."""
        self._room -= 1
        self._moving += 1

    def leave(self) -> None:
        """Note that a request that moves has gone."""
        self._room += 1
        self._moving -= 1
        if self._remedies:
            self._tell()

    def go(self) -> None:
        """Note that one more part of a request moves."""
        self._moving += 1

    def stop(self) -> None:
        """Note that a part waits for a batch, or has ended."""
        self._moving -= 1
        if self._remedies:
            self._tell()

    def _tell(self) -> None:
        if self.is_stalled:
            self._stalled.set()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What an Op gets of one request: its numbers, and the outputs of the Op's inputs by their names."""

    data_id: int
    log_id: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What an Op made of a sample: its output or its failure, and whether that output jumps."""

    output: dict[str, Any] | None = None
    failure: OpFailure | None = None
    jumps: bool = False


ReportStage = Callable[[Stage, Sequence[int], Span], None]
"""Is told of a stage, the data ids that it concerned, and when it began and ended."""


class Worker(Protocol):
    """Works on one batch at a time, with a copy of the Op of its own.

    Attributes:
        index: its number among the workers of the Op.
    """

    index: int

    @property
    def is_spoiled(self) -> bool:
        """Whether it must recover before it can work again."""
        ...

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Work on samples, and give the result of each.

        Ownership: the samples until it returns.

        Cancellation: at once; the worker may be spoiled then.
        """
        ...

    async def recover(self) -> None:
        """Make the worker fit for work again.

        Raises:
            ConfigError: it cannot be started again.

        Cancellation: at once.
        """
        ...


class _State(Enum):
    BLOCKED = auto()
    WAITING = auto()
    SEATED = auto()
    GONE = auto()


class Ticket:
    """One sample's place in a channel."""

    __slots__ = ("_channel", "changed", "data_id", "state")

    def __init__(self, channel: Channel, data_id: int, state: _State = _State.BLOCKED) -> None:
        self._channel = channel
        self.data_id = data_id
        self.state = state
        self.changed: trio.Event | None = None

    @property
    def is_seated(self) -> bool:
        """Whether the sample has its seat."""
        return self.state is _State.SEATED

    async def seated(self) -> None:
        """Wait for a seat.

        Ownership: the ticket, which has to be left in any case.

        Cancellation: at once.
        """
        while self.state is not _State.SEATED:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until the ticket is in another state.

        Cancellation: at once.
        """
        self.changed = trio.Event()
        await self.changed.wait()

    def leave(self) -> None:
        """Give the place up, whichever it is; may be called twice."""
        self._channel.leave(self)


class _Queue:
    """Tickets by data id, without those that have gone."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._heap: list[tuple[int, int, Ticket]] = []
        self._numbers = itertools.count()
        self.count = 0

    def push(self, ticket: Ticket) -> None:
        """Add one."""
        ticket.state = self._state
        self.count += 1
        heapq.heappush(self._heap, (ticket.data_id, next(self._numbers), ticket))

    def pop(self) -> Ticket:
        """Take the one with the smallest data id; there is one."""
        while True:
            ticket = heapq.heappop(self._heap)[2]
            if ticket.state is self._state:
                self.count -= 1
                return ticket

    def forget(self) -> None:
        """Note that one has gone."""
        self.count -= 1
        if not self.count:
            self._heap.clear()


class Channel:
    """The way into one Op.

    Args:
        capacity: how many samples wait at most for a seat; 0 for any number.
        seats: how many samples the Op works on at once, or collects for its batches.
    """

    def __init__(self, capacity: int, seats: int) -> None:
        self.capacity = capacity
        self._free = seats
        self._blocked = _Queue(_State.BLOCKED)
        self._waiting = _Queue(_State.WAITING)

    @property
    def size(self) -> int:
        """How many samples wait for a seat."""
        return self._waiting.count

    def enter_now(self, data_id: int) -> Ticket | None:
        """Give a sample a seat if nobody waits for one; the ticket is the caller's, who has to leave it."""
        if not self._free or self._waiting.count or self._blocked.count:
            return None
        self._free -= 1
        return Ticket(self, data_id, _State.SEATED)

    async def enter(self, data_id: int, *, is_forced: bool = False) -> Ticket:
        """Wait until the channel has taken a sample in; one that is forced is taken in even if it is full.

        Ownership: the ticket is the caller's, who has to leave it.

        Cancellation: at once, while it waits; the sample is not in the channel then.
        """
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
        """Take a sample away, wherever it is."""
        state, ticket.state = ticket.state, _State.GONE
        if state is _State.SEATED:
            self._free += 1
        elif state is _State.WAITING:
            self._waiting.forget()
        elif state is _State.BLOCKED:
            self._blocked.forget()
        if self._waiting.count or self._blocked.count:
            self._advance()

    def _advance(self) -> None:
        while True:
            if self._waiting.count and self._free:
                self._seat(self._waiting.pop())
            elif self._blocked.count and self._has_room():
                ticket = self._blocked.pop()
                self._waiting.push(ticket)
                if ticket.changed is not None:
                    ticket.changed.set()
            else:
                return

    def _has_room(self) -> bool:
        return not self.capacity or self._waiting.count < self.capacity or self._free > 0

    def _seat(self, ticket: Ticket) -> None:
        self._free -= 1
        ticket.state = _State.SEATED
        if ticket.changed is not None:
            ticket.changed.set()
