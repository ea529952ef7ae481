"""Work on thousands of connections in small parts, between which other tasks run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

__all__ = ["Pace", "Spread", "in_batches"]

_AT_ONCE: Final = 64
_PASS_AT_ONCE: Final = 16
_SECONDS_BETWEEN: Final = 0.000_25
"""About what the end of one connection takes."""

T = TypeVar("T")


async def in_batches(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items, and let other tasks run after every few of them.

    Cancellation: at each of these checkpoints.
    """
    for number, item in enumerate(items, 1):
        yield item
        if not number % _AT_ONCE:
            await trio.lowlevel.checkpoint()


class Pace:
    """A gate that few tasks pass in each turn of the event loop, in the order in which they come."""

    __slots__ = ("_limiter",)

    def __init__(self) -> None:
        self._limiter: trio.CapacityLimiter | None = None

    async def turn(self) -> None:
        """Wait for a turn in which few others pass.

        Cancellation: at once.
        """
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(_PASS_AT_ONCE)
        async with self._limiter:
            await trio.lowlevel.checkpoint()


class Spread:
    """Offsets of deadlines that would be the same, so that they wake their tasks one after the other."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next offset in seconds, 0 first."""
        count, self._count = self._count, self._count + 1
        return count * _SECONDS_BETWEEN
