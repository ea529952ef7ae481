"""Whether anything moves in a pipeline that is full, or every request waits for a batch that cannot become full."""

from __future__ import annotations

from collections.abc import Callable

import trio

__all__ = ["StallDetector"]


class StallDetector:
    """Counts what moves.

    Args:
        room: how many requests the pipeline has room for.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._moving = 0
        self._stalled = trio.Event()
        self._remedies: list[Callable[[], None]] = []

    @property
    def is_stalled(self) -> bool:
        """Whether there is no room for more requests and none of those that are there moves."""
        return not self._moving and not self._room

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

    def go(self) -> None:
        """Note that one more part of a request moves."""
        self._moving += 1

    def stop(self) -> None:
        """Note that a part waits for a batch, or has ended."""
        self._moving -= 1
        if self.is_stalled:
            self._stalled.set()
