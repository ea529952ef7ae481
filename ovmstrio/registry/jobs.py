"""Changes of the registry, done one after the other in the order in which they were asked for."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.registry.states import ApplyResult

__all__ = ["Job", "JobQueue"]


class Job:
    """One change and those who wait for it; ``begun`` turns true when others may not join it any more."""

    def __init__(self, work: Callable[[], Awaitable[ApplyResult]]) -> None:
        self.begun = False
        self._work = work
        self._done = trio.Event()
        self._result: ApplyResult | None = None

    async def run(self) -> None:
        """Do the work and wake who waits.

        Cancellation: where the work has its checkpoints; who waits is told by :meth:`abandon`.
        """
        self.begun = True
        self._result = await self._work()
        self._done.set()

    def abandon(self) -> None:
        """Wake who waits for work that will not be done."""
        self._done.set()

    async def wait(self) -> ApplyResult:
        """Return the result once the work is done.

        Raises:
            NotReady: the registry has stopped.

        Cancellation: at once; the work goes on.
        """
        await self._done.wait()
        if self._result is None:
            raise NotReady("the server is shutting down")
        return self._result


class JobQueue:
    """The changes that are asked for and not done."""

    def __init__(self) -> None:
        self._sender, self._receiver = trio.open_memory_channel[Job](math.inf)
        self._open: set[Job] = set()
        self._closed = False

    def put(self, work: Callable[[], Awaitable[ApplyResult]]) -> Job:
        """Queue a change; once the queue has been closed, it is abandoned at once."""
        job = Job(work)
        if self._closed:
            job.abandon()
        else:
            self._open.add(job)
            self._sender.send_nowait(job)
        return job

    async def run(self) -> None:
        """Do the changes, for ever.

        Cancellation: at any checkpoint; changes that are not done are abandoned, and later ones refused at once.
        """
        try:
            async for job in self._receiver:
                await job.run()
                self._open.remove(job)
        finally:
            self._closed = True
            for job in self._open:
                job.abandon()
