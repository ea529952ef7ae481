"""A place for one worker process after the other: when one ends by itself, the next one is started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog
import trio

from ovmstrio.core.reconsidering import readiness_may_have_changed
from ovmstrio.work.backoff import Backoff
from ovmstrio.work.processes.worker_process import WorkerEnded, WorkerProcess

__all__ = ["KeptProcess"]

log = structlog.get_logger(__name__)


class KeptProcess:
    """One of several places for processes that all do the same.

    Args:
        row: the number of the place.
        make: makes a process, which is then started.
        first: what each process is told first.
        descriptor: goes along with it.
        prepare: is called with a process that has been told, and its answer, and says whether it can be used; one that
            cannot is killed.
        cannot_start: is told that no process can be started, which is tried again; without it that ends :meth:`keep`.
        backoff: says when the next process is started.
        stopping: once it is set, no other process is started.
        changed: is called when a process has become ready, and when it has ended.
        ended: is called with the place, its process still in it, when that has ended; what it raises ends
            :meth:`keep`.

    Attributes:
        row: the number of the place.
        is_ready: whether there is a process that has answered what it was told first.
        given: how much the process has been given since.
        process: the one that lives, None if there is none.
        is_replaced: whether the process that ends next is followed by another one at once.
    """

    def __init__(
        self,
        row: int,
        make: Callable[[], WorkerProcess],
        first: Any,
        descriptor: int | None = None,
        *,
        prepare: Callable[[WorkerProcess, Any], Awaitable[bool]] | None = None,
        cannot_start: Callable[[OSError], None] | None = None,
        backoff: Backoff,
        stopping: trio.Event,
        changed: Callable[[], None],
        ended: Callable[[KeptProcess, WorkerProcess], None],
    ) -> None:
        self.row = row
        self.is_ready = False
        self.given = 0
        self.process: WorkerProcess | None = None
        self._make = make
        self._prepare = prepare
        self._cannot_start = cannot_start
        self._first = first
        self._descriptor = descriptor
        self._backoff = backoff
        self._stopping = stopping
        self._changed = changed
        self._ended = ended
        self.is_replaced = False

    async def keep(self) -> None:
        """Run a process, and another one after it, until they are to stop.

        Raises:
            OSError: no process can be started.
            Exception: as ``ended``.

        Ownership: the process.

        Cancellation: at once; the process is killed.
        """
        while not self._stopping.is_set():
            started = trio.current_time()
            await self._run_one()
            if self._stopping.is_set():
                return
            if self.is_replaced:
                continue
            seconds = self._backoff.seconds_after(trio.current_time() - started)
            log.warning("starting another worker process", row=self.row, seconds=seconds)
            with trio.move_on_after(seconds):
                await self._stopping.wait()

    async def _run_one(self) -> None:
        """Run a process to its end.

        Raises:
            OSError: it cannot be started.
            Exception: as ``ended``.

        Cancellation: at once; the process is killed.
        """
        process = self.process = self._make()
        self.given = 0
        try:
            async with trio.open_nursery() as nursery:
                try:
                    answer = await process.start(nursery, self._first, descriptor=self._descriptor)
                    self.is_ready = self._prepare is None or await self._prepare(process, answer)
                except WorkerEnded:
                    self.is_ready = False
                except OSError as error:
                    if self._cannot_start is None:
                        raise
                    self._cannot_start(error)
                    return
                if self.is_ready:
                    self._tell_change()
                else:
                    process.kill()
            self._ended(self, process)
        finally:
            self.process = None
            self.is_ready = False
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed()
        readiness_may_have_changed()

    async def give(self, value: Any, descriptor: int) -> bool:
        """Give the process a descriptor, and say what it is, if it can still take one.

        Ownership: the caller still has its own descriptor.

        Cancellation: at once; it is given or not.
        """
        if self.process is not None:
            self.given += 1
            try:
                await self.process.tell(value, descriptor)
            except WorkerEnded:
                self.is_ready = False
            else:
                return True
        return False

    async def tell(self, value: Any) -> None:
        """Tell the process something, if there is one that is ready.

        Cancellation: at once; it is told or not.
        """
        if self.process is not None and self.is_ready:
            with suppress(WorkerEnded):
                await self.process.tell(value)

    def dismiss(self) -> None:
        """Have the process finish what it has; one that is not ready has nothing, and may take long to become so."""
        if self.process is not None:
            (self.process.finish if self.is_ready else self.process.kill)()
