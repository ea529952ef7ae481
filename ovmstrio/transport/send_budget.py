"""Bytes of answers that wait for clients: one bound for the server, and a share of it for each connection.

A byte counts from when it is encoded until the socket takes it.  Calls that have yet to be answered count with what
their answers are expected to have, so that they wait before they compute what nobody reads.  Clients that take nothing
are cut off by the connections, after the time that is said here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextvars import ContextVar
from typing import Final, Protocol

import trio

__all__ = ["ByteBudget", "PendingAnswers", "PendingShare", "Watched", "current_share"]

# ----------------------------------------------------------------------
# A number of bytes that may be held at once, and the lines of those who wait for some
# ----------------------------------------------------------------------


class ByteBudget:
    """Lets bytes be held up to a limit; more than that at once is fine as long as nothing else is held.

    Args:
        limit: how many; ``math.inf`` for any number.

    Attributes:
        limit: how many bytes may be held.
        held: how many are.
        waiting: how many wait for some.
    """

    __slots__ = ("_first_line", "_line", "held", "limit", "waiting")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held = 0
        self.waiting = 0
        self._first_line: OrderedDict[trio.Event, int] = OrderedDict()
        self._line: OrderedDict[trio.Event, int] = OrderedDict()

    def take(self, size: int) -> bool:
        """Hold some bytes if there is room for them and nobody waits; False if not."""
        if self.waiting or (self.held and self.held + size > self.limit):
            return False
        self.held += size
        return True

    async def wait(self, size: int, *, is_first: bool = False) -> None:
        """Hold some bytes as soon as there is room for them, behind those who came first.

        Args:
            size: how many.
            is_first: whether to wait behind those only who are so as well.

        Cancellation: while it waits; nothing is held then.
        """
        if self.take(size):
            return
        turn, line = trio.Event(), self._first_line if is_first else self._line
        line[turn] = size
        self.waiting += 1
        self.serve_line()
        try:
            # Whoever sets it has taken the bytes.
            await turn.wait()
        except trio.Cancelled:
            # It may have been served after its cancellation was decided.
            if line.pop(turn, None) is None:
                self.held -= size
            else:
                self.waiting -= 1
            self.serve_line()
            raise

    def give_back(self, size: int) -> None:
        """Hold some bytes less."""
        self.held -= size
        self.serve_line()

    def serve_line(self) -> None:
        """Let those who wait go on, in their order, as far as there is room."""
        while self.waiting:
            line = self._first_line or self._line
            turn, wanted = next(iter(line.items()))
            if self.held and self.held + wanted > self.limit:
                return
            del line[turn]
            self.waiting -= 1
            self.held += wanted
            turn.set()


# ----------------------------------------------------------------------
# Bytes of answers that wait for clients: one bound for the server, and a share of it for each connection
# ----------------------------------------------------------------------

_MEBIBYTE: Final = 2**20
_LOOK_SECONDS: Final = 1.0
_HURRY_SECONDS: Final = 5.0
"""How long a client may take nothing while others have to wait for the room that its answers take."""


class Watched(Protocol):
    """Something that is being sent to a client."""

    def look(self, now: float, patience_seconds: float) -> None:
        """Give it up if the client has taken none of it for so long; ``now`` is trio's time."""
        ...


class PendingAnswers:
    """What waits for all clients of a server.

    Args:
        max_bytes: of all connections together; infinite unless given.
        max_share_bytes: of one connection.
        stalled_seconds: how long a client may take nothing of what waits for it; 0 for any time.

    Attributes:
        budget: what waits, expected answers included.
        watched: what ``watch`` looks at.
    """

    def __init__(
        self, max_bytes: float = math.inf, max_share_bytes: int = 64 * _MEBIBYTE, stalled_seconds: float = 60.0
    ) -> None:
        self._max_share_bytes = max_share_bytes
        self._stalled_seconds = stalled_seconds or math.inf
        self.budget = ByteBudget(max_bytes)
        self.watched: set[Watched] = set()

    @property
    def patience_seconds(self) -> float:
        """How long a client may take nothing now: less while there is no room for others."""
        if self.budget.waiting:
            return min(self._stalled_seconds, _HURRY_SECONDS)
        return self._stalled_seconds

    async def watch(self) -> None:
        """Look for clients that take nothing, for ever.

        Cancellation: at any time.
        """
        while True:
            await trio.sleep(_LOOK_SECONDS)
            now, patience = trio.current_time(), self.patience_seconds
            for each in tuple(self.watched):
                each.look(now, patience)

    def share(self) -> PendingShare:
        """Make the share of a new connection, which must be closed with it."""
        return PendingShare(self, self._max_share_bytes)


class PendingShare:
    """What waits for one client.

    Args:
        answers: that it is a share of.
        max_bytes: that may wait for the client.
    """

    __slots__ = ("_all", "_own", "answers")

    def __init__(self, answers: PendingAnswers, max_bytes: int) -> None:
        self.answers = answers
        self._all = answers.budget
        self._own = ByteBudget(max_bytes)

    @property
    def bytes(self) -> int:
        """How many bytes wait, and are expected."""
        return self._own.held

    @property
    def is_full(self) -> bool:
        """Whether more waits than may, so that nothing should be added."""
        return self._own.held > self._own.limit or self._all.held > self._all.limit

    @property
    def unknown_bytes(self) -> int:
        """What an answer counts of whose size nobody knows anything."""
        return int(min(self._own.limit, self._all.limit) // 16)

    def take(self, size: int) -> bool:
        """Count bytes that will come, if there is room for them and nobody waits; False if not."""
        own, everyone = self._own, self._all
        if own.waiting or everyone.waiting or own.held + size > own.limit or everyone.held + size > everyone.limit:
            return False
        own.held += size
        everyone.held += size
        return True

    async def wait(self, size: int) -> None:
        """Count bytes that will come, as soon as there is room for them; more than fit in, when nothing else waits.

        A client for whom nothing waits yet goes before those who have answers to read.

        Cancellation: while it waits; nothing is counted then.
        """
        await self._own.wait(size)
        try:
            await self._all.wait(size, is_first=self._own.held == size)
        except BaseException:
            self._own.give_back(size)
            raise

    def add(self, size: int) -> None:
        """Count bytes that are there, room or not."""
        self._own.held += size
        self._all.held += size

    def give_back(self, size: int) -> None:
        """Count bytes no more: they have been taken, or will not come."""
        own, everyone = self._own, self._all
        own.held -= size
        everyone.held -= size
        if own.waiting:
            own.serve_line()
        if everyone.waiting:
            everyone.serve_line()

    def close(self) -> None:
        """Count nothing any more, at the end of the connection and of all that ran for it."""
        self.give_back(self._own.held)


current_share: Final[ContextVar[PendingShare | None]] = ContextVar("current_share", default=None)
"""The share of the connection that the running task serves."""
