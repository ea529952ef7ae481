"""A fixed pool of infer requests that callers take in turn; it lives as long as its compiled model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import trio

from ovmstrio.openvino.slot import Slot

__all__ = ["RequestPool"]


class _Turn:
    """The place of a caller that waits."""

    slot: Slot


class RequestPool:
    """Hands out slots, first come, first served.

    A memory channel would do the same in three times the steps.

    Attributes:
        size: how many there are.
        active: how many are in use.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = len(slots)
        self.active = 0
        self._free = deque(slots)
        self._callers: dict[trio.lowlevel.Task, _Turn] = {}

    @property
    def waiting(self) -> int:
        """How many callers wait for a slot."""
        return len(self._callers)

    async def acquire(self) -> Slot:
        """Take a slot, which the caller owns until it releases it.

        Cancellation: while waiting; then no slot is taken.
        """
        slot = self._free.popleft() if self._free else await self._turn()
        self.active += 1
        return slot

    async def _turn(self) -> Slot:
        task, turn = trio.lowlevel.current_task(), _Turn()
        self._callers[task] = turn

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._callers[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)
        return turn.slot

    def add(self, slot: Slot) -> None:
        """Have one slot more."""
        self.size += 1
        self.active += 1
        self.release(slot)

    def drop(self) -> None:
        """Have one slot less: one that the caller has taken, and does not give back."""
        self.size -= 1
        self.active -= 1

    def release(self, slot: Slot) -> None:
        """Give a slot back, to the caller that has waited longest if there is one."""
        self.active -= 1
        if not self._callers:
            self._free.append(slot)
            return
        task = next(iter(self._callers))
        self._callers.pop(task).slot = slot
        trio.lowlevel.reschedule(task)
