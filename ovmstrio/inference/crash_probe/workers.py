"""Models that are not known to run: tried in worker processes, several side by side, until there is a verdict."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import structlog
import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.inference.crash_probe.probe import Trial, Verdict
from ovmstrio.inference.crash_probe.results import TrialMemory
from ovmstrio.isolation.program import signal_name
from ovmstrio.isolation.worker_process import WorkerEnded, WorkerProcess
from ovmstrio.util.placement import run_load

__all__ = [
    "Crashed",
    "TrialMode",
    "TrialPool",
    "TrialWorker",
    "TrialWorkers",
    "try_model",
    "try_model_from_thread",
    "trying_models",
]

# ----------------------------------------------------------------------
# The worker processes in which models are tried: lent to one trial at a time, and kept for a while after it
# ----------------------------------------------------------------------

_PROGRAM: Final = "ovmstrio.inference.crash_probe.program"
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


# ----------------------------------------------------------------------
# Models that are not known to run: tried in worker processes, several side by side, until there is a verdict
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

LAYER_SECONDS: Final = 30.0
"""Timeout of the search for the layer that crashes."""


class TrialPool:
    """Tries models that are not known to run.

    Args:
        nursery: hosts the processes.
        memory: what is known.
        tries_again: whether models are tried that are known to crash, once.
        layer_seconds: timeout of the search for the layer that crashes; after it no layer is reported.

    Attributes:
        token: of the event loop, for threads.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        memory: TrialMemory,
        *,
        tries_again: bool = False,
        layer_seconds: float = LAYER_SECONDS,
    ) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self._memory = memory
        self._tries_again = tries_again
        self._layer_seconds = layer_seconds
        self._limiter = trio.CapacityLimiter(len(os.sched_getaffinity(0)))
        self._workers = TrialWorkers(nursery)
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

    async def _crash_of(self, trial: Trial, *deeds: str) -> Crashed | None:
        """Do several things with a model in one process, and give the crash if there was one.

        Raises:
            ConfigError: the model cannot be compiled.
            NotReady: it could not be tried.
        """
        try:
            async with self._workers.lend() as process:
                may_be_spoiled = process.has_tried
                await process.do(trial, deeds)
        except Crashed as crash:
            if not may_be_spoiled:
                return crash
        else:
            return None
        # What an earlier model has done to the memory of the process is no fault of this one.
        try:
            async with self._workers.lend(is_new=True) as process:
                await process.do(trial, deeds)
        except Crashed as crash:
            return crash
        return None

    async def _layer(self, trial: Trial, value: int) -> str:
        """Tell which layer of a model crashes on inputs of a value: the last one of the shortest part that does."""
        with trio.move_on_after(self._layer_seconds):
            try:
                async with self._workers.lend() as process:
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
            except (Crashed, NotReady):
                return ""
        return ""

    async def _crashes(self, trial: Trial, count: int, value: int) -> bool:
        try:
            async with self._workers.lend() as process:
                await process.ask(trial, "part", count=count, value=value)
        except Crashed:
            return True
        return False


# ----------------------------------------------------------------------
# The trials of the server that loads a model: whoever loads one asks here first
# ----------------------------------------------------------------------

TrialMode = Literal["auto", "off", "again"]
"""Whether models are tried that were never seen to run; ``again`` tries those, too, that crashed."""

# Code of users may load models as well, in threads that know of no server but by their context.
_current: Final[ContextVar[TrialPool | None]] = ContextVar("trials of models", default=None)


@contextmanager
def trying_models(
    nursery: trio.Nursery, mode: TrialMode, folder: Path | None, *, layer_seconds: float = LAYER_SECONDS
) -> Iterator[None]:
    """Have models tried that tasks load which start in the block.

    Args:
        nursery: hosts the processes, which end when it is cancelled.
        mode: whether at all.
        folder: where verdicts are remembered.
        layer_seconds: timeout of the search for the layer that crashes.
    """
    if mode == "off":
        yield
        return
    memory = TrialMemory(folder)
    before = _current.set(TrialPool(nursery, memory, tries_again=mode == "again", layer_seconds=layer_seconds))
    try:
        yield
    finally:
        _current.reset(before)


async def try_model(trial: Trial) -> Verdict:
    """Return once a model may be loaded; at once where none are tried.

    Raises:
        ConfigError: OpenVINO crashes, or the model cannot be compiled.
        NotReady: it could not be tried.

    Cancellation: at once; the trial is given up.
    """
    pool = _current.get()
    return Verdict() if pool is None else await pool.try_model(trial)


def try_model_from_thread(trial: Trial) -> None:
    """Do as :func:`try_model`, from a thread that is not the event loop's; what loads on the loop is not tried.

    Raises:
        ConfigError, NotReady: as :func:`try_model`.
    """
    pool = _current.get()
    if pool is not None and not trio.lowlevel.in_trio_run():
        trio.from_thread.run(pool.try_model, trial, trio_token=pool.token)
