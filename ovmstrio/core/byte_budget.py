"""A number of bytes that may be held at once, and the lines of those who wait for some."""

from __future__ import annotations

from collections import OrderedDict

import trio

__all__ = ["ByteBudget"]


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
