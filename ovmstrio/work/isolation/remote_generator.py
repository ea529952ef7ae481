"""A generator in a worker process, as the server sees it."""

from __future__ import annotations

from collections import deque
from typing import Any

import trio

from ovmstrio.work.isolation.generator_hosts import ENDED
from ovmstrio.work.messages.error_codec import decode_error
from ovmstrio.work.messages.message_packets import NO_MESSAGE
from ovmstrio.work.processes import WorkerEnded, WorkerProcess
from ovmstrio.work.user_code.pumps import End, Failed

__all__ = ["RemoteGenerator"]


class RemoteGenerator:
    """A generator that is pulled value by value; see :class:`ovmstrio.work.user_code.pumps.Pump`.

    Args:
        process: where it lives.
        number: its number there.
        limit_seconds: how long a value may take.
        grace_seconds: how long closing may take.
    """

    def __init__(self, process: WorkerProcess, number: int, limit_seconds: float, grace_seconds: float = 2.0) -> None:
        self._process = process
        self._number = number
        self._limit = limit_seconds
        self._grace_seconds = grace_seconds
        self._ready: deque[Any] = deque()
        self._end: End | Failed | None = None

    async def pull(self) -> Any:
        """Give the next value; an ``End`` after the last, a ``Failed`` where the generator raised or its process ended.

        Cancellation: while none is ready; the generator stops within one step.
        """
        while not self._ready:
            if self._end is not None:
                return self._end
            await self._fetch()
        return self._ready.popleft()

    async def _fetch(self) -> None:
        try:
            values, end = await self._process.call(["pull", self._number], limit_seconds=self._limit)
            self._ready.extend(values)
            if end is not None:
                kind, *told = end
                self._end = End() if kind == ENDED else Failed(decode_error(*told))
        except WorkerEnded as ended:
            self._end = Failed(ended)
        except NO_MESSAGE as wrong:
            self._process.condemn(wrong)
            self._end = Failed(WorkerEnded(self._process.why, was_called=True))

    async def aclose(self) -> BaseException | None:
        """Stop the generator and close it, within one step; gives what closing raised.

        Cancellation: shielded, for ``grace_seconds``.
        """
        self._ready.clear()
        if self._end is not None:
            return None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._grace_seconds):
            try:
                told = await self._process.call(["close", self._number])
                return decode_error(told[0]) if told else None
            except WorkerEnded:
                return None
            except NO_MESSAGE as wrong:
                self._process.condemn(wrong)
                return None
        return TimeoutError("the generator's step did not end; the generator is closed when it does")
