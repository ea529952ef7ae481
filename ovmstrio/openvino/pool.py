"""A fixed pool of infer requests that callers take in turn; it lives as long as its compiled model."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ovmstrio.openvino.slot import Slot

__all__ = ["RequestPool"]


class RequestPool:
    """Hands out slots, first come, first served.

    Attributes:
        size: how many there are.
        active: how many are in use.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = len(slots)
        self.active = 0
        self._give, self._take = trio.open_memory_channel[Slot](len(slots))
        for slot in slots:
            self._give.send_nowait(slot)

    @property
    def waiting(self) -> int:
        """How many callers wait for a slot."""
        return self._take.statistics().tasks_waiting_receive

    async def acquire(self) -> Slot:
        """Take a slot, which the caller owns until it releases it.

        Cancellation: while waiting; then no slot is taken.
        """
        try:
            slot = self._take.receive_nowait()
        except trio.WouldBlock:
            slot = await self._take.receive()
        self.active += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back, to the caller that has waited longest if there is one."""
        self.active -= 1
        self._give.send_nowait(slot)
