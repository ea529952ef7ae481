"""Limits, hardly ever reached, of how long events are waited for: one task looks at all of them, now and then.

A cancel scope for each would cost more than all else that an inference of a millisecond has to do to be waited for.
"""

from __future__ import annotations

from typing import Final

import trio

_LOOK_SECONDS: Final = 0.02


class _Limits:
    """The events that are waited for, and until when, in trio's time."""

    __slots__ = ("_begun", "_due")

    def __init__(self) -> None:
        self._due: dict[trio.Event, float] = {}
        self._begun = trio.Event()

    async def wait(self, event: trio.Event, seconds: float) -> None:
        self._due[event] = trio.current_time() + seconds
        self._begun.set()
        try:
            await event.wait()
        finally:
            del self._due[event]

    async def watch(self) -> None:
        while True:
            if not self._due:
                self._begun = trio.Event()
                await self._begun.wait()
            await trio.sleep(_LOOK_SECONDS)
            now = trio.current_time()
            for event in [event for event, until in self._due.items() if until <= now]:
                event.set()

    def end_all(self) -> None:
        for event in self._due:
            event.set()


_watched: Final = trio.lowlevel.RunVar[tuple[_Limits, ...]]("limits of waiting", ())


async def watch_overdue(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """End waits of this run of the loop that take too long, some 20 ms late, for as long as this runs.

    It sleeps where nothing is waited for.  Of several at once one does it all.

    Args:
        task_status: for ``nursery.start``.

    Cancellation: at once; waits that it would have watched are over, and later ones have cancel scopes of their own.
    """
    limits = _Limits()
    _watched.set((*_watched.get(), limits))
    task_status.started()
    try:
        await limits.watch()
    finally:
        _watched.set(tuple(each for each in _watched.get() if each is not limits))
        limits.end_all()


async def wait_within(event: trio.Event, seconds: float) -> None:
    """Wait for an event that nobody else waits for, or for so many seconds, behind which it may be set as well.

    Cancellation: at once.
    """
    if watched := _watched.get():
        await watched[-1].wait(event, seconds)
        return
    with trio.move_on_after(seconds):
        await event.wait()
