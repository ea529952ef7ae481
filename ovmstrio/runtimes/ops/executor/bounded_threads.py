"""Threads for code of users whose callers may leave it alone, of which there is an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_here

__all__ = ["BoundedThreads"]


class BoundedThreads:
    """So many threads.

    Args:
        most: how many there may be.
        what: what runs in them, for messages.
    """

    def __init__(self, most: int, what: str) -> None:
        self._what = what
        self._limiter = trio.CapacityLimiter(most)
        self._calling = 0

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread, unless half of all threads are in calls whose callers have gone.

        Raises:
            UserCodeRaisedError: it raised.
            TimeoutError: they are.

        Ownership: the arguments until the call has ended, which may be after this has been cancelled.

        Cancellation: at once; the thread goes on.
        """
        stuck = self._limiter.borrowed_tokens - self._calling
        if 2 * stuck >= self._limiter.total_tokens:
            raise TimeoutError(f"{stuck:.0f} {self._what} do not end")
        self._calling += 1
        try:
            result = await trio.to_thread.run_sync(
                call_here, function, args, abandon_on_cancel=True, limiter=self._limiter
            )
        finally:
            self._calling -= 1
        if isinstance(result, UserCodeRaisedError):
            raise result
        return result
