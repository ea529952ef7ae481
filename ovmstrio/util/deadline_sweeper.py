"""Timeouts of waits for events, checked periodically by one task for all waits.

The timeouts are hardly ever reached.  One cancel scope per wait would cost more than the rest of the waiting for an
inference of a millisecond.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

import trio

_CHECK_INTERVAL_SECONDS: Final = 0.02


class _PendingWaits:
    """The awaited events with their deadlines in trio's time."""

    __slots__ = ("_deadlines", "_has_waits")

    def __init__(self) -> None:
        self._deadlines: dict[trio.Event, float] = {}
        self._has_waits = trio.Event()

    async def wait(self, event: trio.Event, seconds: float) -> None:
        self._deadlines[event] = trio.current_time() + seconds
        self._has_waits.set()
        try:
            await event.wait()
        finally:
            del self._deadlines[event]

    async def watch(self) -> None:
        while True:
            if not self._deadlines:
                self._has_waits = trio.Event()
                await self._has_waits.wait()
            await trio.sleep(_CHECK_INTERVAL_SECONDS)
            now = trio.current_time()
            for event in [event for event, deadline in self._deadlines.items() if deadline <= now]:
                event.set()

    def end_all(self) -> None:
        for event in self._deadlines:
            event.set()


_active_sweepers: Final = trio.lowlevel.RunVar[tuple[_PendingWaits, ...]]("deadline sweepers", ())


async def watch_overdue(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """End overdue waits of this trio run until cancelled, each up to about 20 ms late.

    The task sleeps while there are no waits.  If several tasks run, the one started last handles all new waits.

    Args:
        task_status: for ``nursery.start``.

    Cancellation: at once; the task's pending waits end, and later waits use their own cancel scopes.
    """
    waits = _PendingWaits()
    _active_sweepers.set((*_active_sweepers.get(), waits))
    task_status.started()
    try:
        await waits.watch()
    finally:
        _active_sweepers.set(tuple(other for other in _active_sweepers.get() if other is not waits))
        waits.end_all()


def wait_within(event: trio.Event, seconds: float) -> Coroutine[Any, Any, None]:
    """Wait for an event that has no other waiter, for at most ``seconds``; a timeout may set the event.

    Cancellation: at once.
    """
    sweepers = _active_sweepers.get()
    return sweepers[-1].wait(event, seconds) if sweepers else _wait_alone(event, seconds)


async def _wait_alone(event: trio.Event, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await event.wait()
