"""The order in which the requests of one connection have come, for those that it matters to.

Requests that come together run in tasks that start in any order.  Each is noted when its last byte has been read, and
one that order matters to waits until all before it that are for the same service have been where it is now.  It does so
before each place where requests stand in line, and behind the last one: whoever came later must neither stand before it
nor hold what it waits for.

::

    last byte ─> Arrivals.note ─> task ─> call(name) ─┬─> settle                                       in any order
                                                      └─> take_turn ─> a line ─> take_turn ─> settle   in order
"""

from __future__ import annotations

import heapq
from typing import Final

import trio

__all__ = ["Arrival", "Arrivals"]

_SETTLED: Final = -1

_Queue = tuple[str, int]
"""What the requests of a queue call, and how many turns they have had."""


class Arrivals:
    """The requests of one connection that have come whole and are not where order matters yet.

    Noting, naming and settling cost the same however many there are.

    Attributes:
        waiting: how many requests wait for their turns, by queue; no queue without one.
    """

    __slots__ = ("_named", "_unnamed", "waiting")

    def __init__(self) -> None:
        self._unnamed: list[tuple[int, Arrival]] = []
        self._named: dict[_Queue, list[tuple[int, Arrival]]] = {}
        self.waiting: dict[_Queue, int] = {}

    def note(self, number: int) -> Arrival:
        """Note a request that has come whole, as that number; whoever serves it must settle it in the end.

        Numbers grow with time.  Those of one read may be noted in any order, before any task runs.
        """
        arrival, unnamed = Arrival(self, number), self._unnamed
        # Written out, as are others here: this is done for every request.
        while unnamed and (unnamed[0][1].name or unnamed[0][1].turns):
            heapq.heappop(unnamed)
        heapq.heappush(unnamed, (number, arrival))
        return arrival

    def put(self, arrival: Arrival) -> None:
        """Put a request into its next queue, where all that came before it are already, or have been."""
        queue = arrival.name, arrival.turns
        named = self._named.get(queue)
        if named is None:
            self._named[queue] = [(arrival.number, arrival)]
        else:
            heapq.heappush(named, (arrival.number, arrival))

    def first(self, queue: _Queue) -> Arrival | None:
        """Give the request of a queue whose turn it is; None while one before it may be for the same service."""
        unnamed, named = self._unnamed, self._named.get(queue)
        while unnamed and (unnamed[0][1].name or unnamed[0][1].turns):
            heapq.heappop(unnamed)
        while named and named[0][1].turns != queue[1]:
            heapq.heappop(named)
        if not named:
            self._named.pop(queue, None)
            return None
        number, first = named[0]
        return None if unnamed and unnamed[0][0] < number else first

    def pass_on(self, arrival: Arrival) -> bool:
        """Put a request into its next queue if it is its turn; tells whether it was."""
        before = arrival.name, arrival.turns
        if self.first(before) is not arrival:
            return False
        named = self._named[before]
        heapq.heappop(named)
        if not named:
            del self._named[before]
        arrival.turns += 1
        self.put(arrival)
        if self.waiting:
            self.left(before)
        return True

    async def wait(self, arrival: Arrival) -> None:
        """Wait until a request is the first of its queue."""
        queue = arrival.name, arrival.turns
        arrival.turn = trio.Event()
        self.waiting[queue] = self.waiting.get(queue, 0) + 1
        try:
            await arrival.turn.wait()
        finally:
            self.waiting[queue] -= 1
            if not self.waiting[queue]:
                del self.waiting[queue]

    def left(self, queue: _Queue) -> None:
        """Look whose turn it is, as a request has left a queue, or is known not to be in it."""
        if queue in self._named or self.waiting:
            self.first(queue)
        for each in tuple(self.waiting) if self.waiting else ():
            first = self.first(each)
            if first is not None and first.turn is not None:
                first.turn.set()


class Arrival:
    """One request.

    Attributes:
        number: grows with the time at which it was whole.
        name: of the service that it is for; empty until that is known.
        turns: how many it has had; below 0 when nobody waits for it any more.
        turn: is set when it is the first of those that it waits with.
    """

    __slots__ = ("_all", "name", "number", "turn", "turns")

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        self._all = arrivals
        self.number = number
        self.name = ""
        self.turns = 0
        self.turn: trio.Event | None = None

    def call(self, name: str) -> None:
        """Say which service it is for, so that nobody who calls another one waits for it."""
        if not self.name and name:
            self.name = name
            self._all.put(self)
            if self._all.waiting:
                self._all.left(("", 0))

    async def take_turn(self) -> None:
        """Wait until every request for the same service that came before has taken as many turns, or is settled.

        What is done before the next checkpoint is done in the order of arrival.

        Cancellation: while it waits; a request that is not settled holds up later ones.  Not a checkpoint if none is
        before it.
        """
        while not self._all.pass_on(self):
            await self._all.wait(self)

    def settle(self) -> None:
        """Let nobody wait for it any more; may be called again."""
        if self.turns != _SETTLED:
            queue, self.turns = (self.name, self.turns), _SETTLED
            if self.name or self._all.waiting:
                self._all.left(queue)
