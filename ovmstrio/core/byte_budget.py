"""A number of bytes that may be held at once, and the line of those who wait for some."""

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
        line: who waits, and for how many.
    """

    __slots__ = ("held", "limit", "line")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held = 0
        self.line: OrderedDict[trio.Event, int] = OrderedDict()

    def take(self, size: int) -> bool:
        """Hold some bytes if there is room for them and nobody waits; False if not."""
        if self.line or (self.held and self.held + size > self.limit):
            return False
        self.held += size
        return True

    async def wait(self, size: int) -> None:
        """Hold some bytes as soon as there is room for them, behind those who came first.

        Cancellation: while it waits; nothing is held then.
        """
        if self.take(size):
            return
        turn = trio.Event()
        self.line[turn] = size
        try:
            # Whoever sets it has taken the bytes.
            await turn.wait()
        except trio.Cancelled:
            # It may have been served after its cancellation was decided.
            if self.line.pop(turn, None) is None:
                self.held -= size
            self.serve_line()
            raise

    def give_back(self, size: int) -> None:
        """Hold some bytes less."""
        self.held -= size
        self.serve_line()

    def serve_line(self) -> None:
        """Let those who wait go on, in their order, as far as there is room."""
        while self.line:
            turn, wanted = next(iter(self.line.items()))
            if self.held and self.held + wanted > self.limit:
                return
            del self.line[turn]
            self.held += wanted
            turn.set()
