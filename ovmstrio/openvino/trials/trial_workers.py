"""The worker processes in which models are tried: lent to one trial at a time, and kept for a while after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.openvino.trials.trial import Trial
from ovmstrio.work.processes import WorkerEnded, WorkerProcess
from ovmstrio.work.processes.program import signal_name

__all__ = ["Crashed", "TrialWorker", "TrialWorkers"]

_PROGRAM: Final = "ovmstrio.openvino.trials.program"
_CRASHES: Final = frozenset({"SIGFPE", "SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
"""Signals that what runs in a process brings upon it; others are sent to it, as by who saves memory."""
_IDLE_SECONDS: Final = 3.0
"""How long a process is kept for the next model: it has taken a second to start, and has much memory."""
_SECONDS_TO_LEAVE: Final = 2.0


class Crashed(Exception):
    """The process that tried a model was ended by the signal of this name, while it did what it was asked."""

    def __init__(self, name: str, deed: str) -> None:
        super().__init__(name)
        self.name = name
        self.deed = deed


class TrialWorker:
    """A worker process.

    Attributes:
        has_tried: whether it has been used before.
    """

    def __init__(self) -> None:
        self.worker = WorkerProcess(_PROGRAM)
        self.has_tried = False
        self._taken = trio.Event()

    def put_back(self) -> trio.Event:
        """Give the event that is set when it is taken again."""
        self.has_tried = True
        self._taken = trio.Event()
        return self._taken

    async def take(self, nursery: trio.Nursery) -> None:
        """Begin to use it, which starts it once.

        Raises:
            NotReady: it cannot be started.
        """
        self._taken.set()
        if self.worker.pid is not None:
            return
        try:
            await self.worker.start(nursery, None)
        except (OSError, WorkerEnded) as error:
            raise NotReady(f"models cannot be tried: no worker process can be started ({error})") from error

    async def do(self, trial: Trial, deeds: Sequence[str]) -> None:
        """Have it do one thing after the other with a model.

        Raises:
            ConfigError: the model cannot be compiled.
            Crashed, NotReady: as :meth:`ask`.
        """
        for deed in deeds:
            problems = await self.ask(trial, deed)
            if problems:
                raise ConfigError([Problem(**problem) for problem in problems])

    async def ask(self, trial: Trial, deed: str, **details: Any) -> Any:
        """Have it do something with a model, and give its answer.

        Raises:
            Crashed: the process was ended by a signal of its own making.
            NotReady: it was ended by anything else.
        """
        question = {**asdict(trial), "path": str(trial.path), "source": str(trial.source), **details, "deed": deed}
        try:
            return await self.worker.call(question)
        except WorkerEnded as error:
            await self.worker.ended.wait()
            status = self.worker.status or 0
            if status < 0 and signal_name(-status) in _CRASHES:
                raise Crashed(signal_name(-status), deed) from error
            raise NotReady(f"the model {trial.name!r} could not be tried: the worker process {error.why}") from error


class TrialWorkers:
    """Processes that have nothing to do at the moment, and new ones.

    Args:
        nursery: hosts them.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._idle: list[TrialWorker] = []

    @asynccontextmanager
    async def lend(self, *, is_new: bool = False) -> AsyncIterator[TrialWorker]:
        """Lend a process, which is kept for the next model unless it has ended; one that has tried none on demand.

        Raises:
            NotReady: none can be started.
        """
        sound = [process for process in self._idle if not (is_new or process.worker.is_retired)]
        process = sound[-1] if sound else TrialWorker()
        if sound:
            self._idle.remove(process)
        await process.take(self._nursery)
        try:
            yield process
        except ConfigError:
            self._keep(process)
            raise
        except BaseException:
            process.worker.kill()
            raise
        self._keep(process)

    def _keep(self, process: TrialWorker) -> None:
        self._idle.append(process)
        self._nursery.start_soon(self._dismiss_when_idle, process, process.put_back())

    async def _dismiss_when_idle(self, process: TrialWorker, taken: trio.Event) -> None:
        with trio.move_on_after(_IDLE_SECONDS):
            await taken.wait()
        if not taken.is_set():
            self._idle.remove(process)
            await process.worker.close(_SECONDS_TO_LEAVE)
