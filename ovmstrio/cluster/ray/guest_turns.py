"""When a loop of trio that is a guest of an asyncio loop, in the same thread, has its turns.

::

    nothing waits for the outside ──> a turn when the host asks for one, at a deadline, and after some milliseconds
    a call waits for the outside ───> a thread waits for trio's events, as in any guest run

A call whose work never waits costs one turn, which its caller takes at once, and neither another thread nor another
turn of the host: waking a thread and being woken by it took a quarter of what a trivial call takes.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["GuestTurns"]

_RESTING_SECONDS: Final = 0.05
"""How long what nobody waits for may go unnoticed."""
_ASKING_SECONDS: Final = 0.001
"""The same while calls wait for the host alone, as far as is known: some part of theirs may wait for the outside."""
_AT_ONCE: Final = 4


class GuestTurns(trio.abc.Clock):
    """The clock of a guest run, which trio asks how long it may sleep, and what the run hands its turns to.

    Args:
        loop: the host.

    Attributes:
        calls: how many calls have not ended, and whatever else may not go unnoticed.
        asking: how many questions to the host those wait for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.calls = 0
        self.asking = 0
        self._turn: Callable[[], object] | None = None
        self._is_idle = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    # As trio's clock

    def start_clock(self) -> None:
        """Need no start."""

    def current_time(self) -> float:
        """Give the time, in seconds."""
        return perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Tell how long trio may wait for events; it asks where nothing can run."""
        self._is_idle, self._deadline = True, deadline
        # With no time to wait it hands its next turn over, and starts no thread.
        return deadline - perf_counter() if self._waits_outside else 0.0

    @property
    def _waits_outside(self) -> bool:
        return self.calls > self.asking

    # As what the run hands its turns to

    def hold(self, turn: Callable[[], object]) -> None:
        """Take over the next turn, from the host's thread."""
        self._turn = turn
        if self._is_idle and not self._waits_outside:
            self._wake_at(min(self._deadline, perf_counter() + (_ASKING_SECONDS if self.calls else _RESTING_SECONDS)))
        else:
            self._loop.call_soon(self._take)

    def deliver(self, turn: Callable[[], object]) -> None:
        """Have the host take a turn for which a thread has waited, from any thread.

        Raises:
            RuntimeError: the host has ended.
        """
        self._loop.call_soon_threadsafe(self._run, turn)

    def take_now(self) -> None:
        """Take a turn, and some more while there is something to do, where trio does not wait in a thread.

        What has been handed to trio from outside of a turn is seen to; without a turn in hand trio is woken by itself.
        """
        for _ in range(_AT_ONCE):
            if not self._take() or self._is_idle:
                return

    def _take(self) -> bool:
        turn, self._turn = self._turn, None
        if turn is None:
            return False
        self._run(turn)
        return True

    def _run(self, turn: Callable[[], object]) -> None:
        self._is_idle = False
        turn()

    def _wake_at(self, due: float) -> None:
        """See that a turn is taken by then; a timer that comes earlier is kept, for making one costs more than it."""
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(max(0.0, due - perf_counter()), self._wake)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        self._take()

    def stop(self) -> None:
        """Drop the timer, behind the last turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
