"""Who is let into a pipeline: so many requests at once, the others wait in the order in which they came."""

from __future__ import annotations

from collections import OrderedDict

import trio

from ovmstrio.runtimes.ops.codes import CustomExceptionCode
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure

__all__ = ["Admission"]


class _Turn:
    """One request that waits; ``is_in`` once a place is its own."""

    __slots__ = ("called", "is_in")

    def __init__(self) -> None:
        self.is_in = False
        self.called = trio.Event()


class Admission:
    """The door.

    Args:
        room: how many requests are inside at once.
        max_waiting: how many wait at most; None for any number.
    """

    def __init__(self, room: int, max_waiting: int | None = None) -> None:
        self._free = room
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[_Turn, None] = OrderedDict()
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def enter_now(self) -> bool:
        """Let a request in if it has not to wait; the place is the caller's then, who has to :meth:`leave` it."""
        if self.is_closed or not self._free or self._waiting:
            return False
        self._free -= 1
        return True

    async def enter(self, deadline: float) -> None:
        """Wait to be let in.

        Raises:
            OpFailure: 3001, nobody is let in any more; 6000, the deadline passed first; 3002, too many wait.

        Ownership: a place inside, which the caller has to :meth:`leave`.

        Cancellation: at once, while it waits.
        """
        if self.is_closed:
            raise failures.closed()
        if self.enter_now():
            return
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            text = f"too many requests: {len(self._waiting)} wait, as many as may; try again later"
            raise OpFailure(CustomExceptionCode.NO_SERVICE.value, text, is_overload=True)
        await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        turn = _Turn()
        self._waiting[turn] = None
        try:
            with trio.move_on_at(deadline):
                await turn.called.wait()
        except BaseException:
            self._give_up(turn)
            raise
        if turn.is_in:
            return
        self._give_up(turn)
        raise failures.closed() if self.is_closed else failures.out_of_time()

    def _give_up(self, turn: _Turn) -> None:
        if turn.is_in:
            self.leave()
        else:
            self._waiting.pop(turn, None)

    def leave(self) -> None:
        """Give the place up, to the first that waits."""
        if self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            turn.is_in = True
            turn.called.set()
        else:
            self._free += 1

    def close(self) -> None:
        """Let nobody in any more, and send those away that wait."""
        self.is_closed = True
        waiting, self._waiting = self._waiting, OrderedDict()
        for turn in waiting:
            turn.called.set()
