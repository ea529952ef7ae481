"""The worker processes in which models are tried, one after the other in each, several side by side."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakValueDictionary

import structlog
import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.openvino.trials.memory import TrialMemory
from ovmstrio.openvino.trials.trial import Trial, Verdict
from ovmstrio.work.placement import run_load
from ovmstrio.work.processes import WorkerEnded, WorkerProcess
from ovmstrio.work.processes.program import signal_name

__all__ = ["TrialPool"]

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.openvino.trials.program"
_CRASHES: Final = frozenset({"SIGFPE", "SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
"""Signals that what runs in a process brings upon it; others are sent to it, as by who saves memory."""
_IDLE_SECONDS: Final = 3.0
"""How long a process is kept for the next model: it has taken a second to start, and has much memory."""
_SECONDS_TO_LEAVE: Final = 2.0
_SECONDS_FOR_LAYER: Final = 30.0
"""How long the layer is looked for that crashes; where it takes longer, it is not told."""


class _Crashed(Exception):
    """The process that tried a model was ended by the signal of this name, while it did what it was asked."""

    def __init__(self, name: str, deed: str) -> None:
        super().__init__(name)
        self.name = name
        self.deed = deed


class TrialPool:
    """Tries models that are not known to run.

    Args:
        nursery: hosts the processes.
        memory: what is known.
        tries_again: whether models are tried that are known to crash, once.

    Attributes:
        token: of the event loop, for threads.
    """

    def __init__(self, nursery: trio.Nursery, memory: TrialMemory, *, tries_again: bool = False) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self._nursery = nursery
        self._memory = memory
        self._tries_again = tries_again
        self._limiter = trio.CapacityLimiter(len(os.sched_getaffinity(0)))
        self._idle: list[_Process] = []
        self._seen: set[str] = set()
        self._under_way: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()

    async def try_model(self, trial: Trial) -> Verdict:
        """Return once a model has run, now or in an earlier trial.

        Raises:
            ConfigError: OpenVINO crashes, now or in an earlier trial, or the model cannot be compiled.
            NotReady: it could not be tried.

        Cancellation: at once; the process is killed.
        """
        try:
            key = await run_load(lambda: self._memory.key_of(trial))
        except OSError as error:
            raise ConfigError([Problem(f"cannot be read: {error.strerror}", file=str(error.filename))]) from error
        lock = self._under_way.setdefault(key, trio.Lock())
        async with lock:
            verdict = await run_load(lambda: self._known(key))
            remembered = verdict is not None
            if verdict is None:
                verdict = await self._try(trial)
                new = verdict
                await run_load(lambda: self._memory.remember(key, new))
            self._seen.add(key)
        if verdict.crash:
            raise verdict.refusal(trial, self._memory.path_of(key) if remembered else None)
        if (remark := verdict.remark(trial)) is not None:
            log.warning("model crashes on zeros", model=trial.name, reason=str(remark))
        return verdict

    def _known(self, key: str) -> Verdict | None:
        verdict = self._memory.recall(key)
        if verdict is not None and verdict.crash and self._tries_again and key not in self._seen:
            return None
        return verdict

    async def _try(self, trial: Trial) -> Verdict:
        """Have a model run on ones, then on zeros; the second must not crash it, but is told.

        Raises:
            ConfigError: it cannot be compiled.
            NotReady: it could not be tried.
        """
        log.info("trying a model that was never seen to run here", model=trial.name, path=str(trial.source))
        verdict = Verdict(day=datetime.now(UTC).date().isoformat())
        async with self._limiter:
            crashed = await self._crash_of(trial, "load", "zeros", "forget")
            if crashed is None:
                return verdict
            # Memory that is spoiled shows only when it is given back.
            on_ones = crashed if crashed.deed == "load" else await self._crash_of(trial, "load", "forget")
            if on_ones is not None:
                return replace(verdict, crash=on_ones.name, layer=await self._layer(trial, 1))
            return replace(verdict, zeros_crash=crashed.name, zeros_layer=await self._layer(trial, 0))

    async def _crash_of(self, trial: Trial, *deeds: str) -> _Crashed | None:
        """Do several things with a model in one process, and give the crash if there was one.

        Raises:
            ConfigError: the model cannot be compiled.
            NotReady: it could not be tried.
        """
        try:
            async with self._process() as process:
                for deed in deeds:
                    problems = await process.ask(trial, deed)
                    if problems:
                        raise ConfigError([Problem(**problem) for problem in problems])
        except _Crashed as crash:
            return crash
        return None

    async def _layer(self, trial: Trial, value: int) -> str:
        """Tell which layer of a model crashes on inputs of a value: the last one of the shortest part that does."""
        with trio.move_on_after(_SECONDS_FOR_LAYER):
            try:
                async with self._process() as process:
                    layers = await process.ask(trial, "layers")
                sound, crashing = 0, len(layers)
                if not layers or not await self._crashes(trial, crashing, value):
                    return ""
                while crashing - sound > 1:
                    middle = (sound + crashing) // 2
                    if await self._crashes(trial, middle, value):
                        crashing = middle
                    else:
                        sound = middle
                return str(layers[crashing - 1])
            except (_Crashed, NotReady):
                return ""
        return ""

    async def _crashes(self, trial: Trial, count: int, value: int) -> bool:
        try:
            async with self._process() as process:
                await process.ask(trial, "part", count=count, value=value)
        except _Crashed:
            return True
        return False

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[_Process]:
        """Lend a process, which is kept for the next model unless it has ended.

        Raises:
            NotReady: none can be started.
        """
        sound = [process for process in self._idle if not process.worker.is_retired]
        process = sound[-1] if sound else _Process()
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

    def _keep(self, process: _Process) -> None:
        self._idle.append(process)
        self._nursery.start_soon(self._dismiss_when_idle, process, process.put_back())

    async def _dismiss_when_idle(self, process: _Process, taken: trio.Event) -> None:
        with trio.move_on_after(_IDLE_SECONDS):
            await taken.wait()
        if not taken.is_set():
            self._idle.remove(process)
            await process.worker.close(_SECONDS_TO_LEAVE)


class _Process:
    """A worker process, and whether it has been taken by somebody since it was put back last."""

    def __init__(self) -> None:
        self.worker = WorkerProcess(_PROGRAM)
        self._taken = trio.Event()

    def put_back(self) -> trio.Event:
        """Give the event that is set when it is taken again."""
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

    async def ask(self, trial: Trial, deed: str, **details: Any) -> Any:
        """Have it do something with a model, and give its answer.

        Raises:
            _Crashed: the process was ended by a signal of its own making.
            NotReady: it was ended by anything else.
        """
        question = {**asdict(trial), "path": str(trial.path), "source": str(trial.source), **details, "deed": deed}
        try:
            return await self.worker.call(question)
        except WorkerEnded as error:
            await self.worker.ended.wait()
            status = self.worker.status or 0
            if status < 0 and signal_name(-status) in _CRASHES:
                raise _Crashed(signal_name(-status), deed) from error
            raise NotReady(f"the model {trial.name!r} could not be tried: the worker process {error.why}") from error
