"""Periodic check: runs a function at an interval, at once on request, and with back-off after an incomplete check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ovmstrio.util.backoff import Backoff


class PeriodicCheck:
    """Task that repeats a check.

    Args:
        check: the check; returns False if it was incomplete.
        pause_seconds: time from the end of one check to the start of the next.
        backoff: pauses after incomplete checks; by default ``pause_seconds``.

    Attributes:
        finished_checks: number of finished checks.
    """

    def __init__(
        self, check: Callable[[], Awaitable[bool]], pause_seconds: float, backoff: Backoff | None = None
    ) -> None:
        self.finished_checks = 0
        self._check = check
        self._pause_seconds = pause_seconds
        self._backoff = backoff or Backoff(pause_seconds, pause_seconds)
        self._is_checking = False
        self._requested = trio.Event()
        self._ended = trio.Event()

    async def run(self, *, pauses_first: bool = False) -> None:
        """Repeat the check until cancelled; an exception of the check ends this."""
        if pauses_first:
            await self._pause(self._pause_seconds)
        while True:
            await self._pause(self._pause_seconds if await self._check_once() else self._backoff.seconds_after())

    async def wait_check(self) -> None:
        """Wait for the end of the current or next check."""
        await self._ended.wait()

    async def check_now(self) -> None:
        """Run a check at once, or right after the current one, and wait for its end."""
        last = self.finished_checks + 1 + self._is_checking
        self._requested.set()
        while self.finished_checks < last:
            await self._ended.wait()

    async def _check_once(self) -> bool:
        self._requested = trio.Event()
        self._is_checking = True
        try:
            is_complete = await self._check()
        finally:
            self._is_checking = False
        if is_complete:
            self._backoff.reset()
        self.finished_checks += 1
        self._ended.set()
        self._ended = trio.Event()
        return is_complete

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._requested.wait()
