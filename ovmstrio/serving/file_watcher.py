"""The task that looks at files and versions again and again, whatever is done with what it finds.

::

    look ──> tell that it has ended ──> pause ──> look
                                          └ shorter if somebody asks, longer while looks fail
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ovmstrio.util.backoff import Backoff

__all__ = ["FileWatcher"]


class FileWatcher:
    """Looks, pauses and looks again.

    Args:
        look: looks once, and takes over what is new; tells whether everything could be seen.
        pause_seconds: from the end of one look to the begin of the next.
        backoff: the pauses after looks that could not see everything; ``pause_seconds`` as well if None.

    Attributes:
        looks: how many looks have ended.
    """

    def __init__(
        self, look: Callable[[], Awaitable[bool]], pause_seconds: float, backoff: Backoff | None = None
    ) -> None:
        self.looks = 0
        self._look = look
        self._pause_seconds = pause_seconds
        self._backoff = backoff or Backoff(pause_seconds, pause_seconds)
        self._is_looking = False
        self._wanted = trio.Event()
        self._ended = trio.Event()

    async def run(self, *, pauses_first: bool = False) -> None:
        """Look until cancelled.

        Raises:
            Whatever a look raises, which ends the watcher.

        Cancellation: at once while it pauses, else as a look.
        """
        if pauses_first:
            await self._pause(self._pause_seconds)
        while True:
            await self._pause(self._pause_seconds if await self._look_once() else self._backoff.seconds_after())

    async def wait_look(self) -> None:
        """Wait for the end of the next look, or of the one that is under way.

        Cancellation: at once; nothing is held.
        """
        await self._ended.wait()

    async def look_now(self) -> None:
        """Have a look begin at once, or right after the one that is under way, and wait for its end.

        Cancellation: at once; the look goes on, owned by :meth:`run`.
        """
        last = self.looks + 1 + self._is_looking
        self._wanted.set()
        while self.looks < last:
            await self._ended.wait()

    async def _look_once(self) -> bool:
        self._wanted = trio.Event()
        self._is_looking = True
        try:
            is_complete = await self._look()
        finally:
            self._is_looking = False
        if is_complete:
            self._backoff.reset()
        self.looks += 1
        self._ended.set()
        self._ended = trio.Event()
        return is_complete

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._wanted.wait()
