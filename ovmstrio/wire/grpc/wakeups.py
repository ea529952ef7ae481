"""One task's wait for another: cheaper than an event, because nothing is made anew for each wait."""

from __future__ import annotations

import trio

__all__ = ["Wakeup"]


class Wakeup:
    """A place where one task at a time waits until another task wakes it.

    Nothing is remembered: the waiter checks its condition, waits, and checks again, with no checkpoint between the
    check and the wait.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def waiting(self) -> bool:
        """Whether a task waits here."""
        return self._task is not None

    async def wait(self) -> None:
        """Wait for the next ``wake``.

        Raises:
            trio.BusyResourceError: another task waits here already.
        """
        if self._task is not None:
            raise trio.BusyResourceError("another task is waiting here already")
        self._task = trio.lowlevel.current_task()

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def wake(self) -> None:
        """Let the waiting task, if there is one, go on."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)
