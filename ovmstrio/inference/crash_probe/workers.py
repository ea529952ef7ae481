"""Crash probe: models not known to run are first loaded in worker processes, several at a time."""

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
from ovmstrio.inference.crash_probe.verdict import PROGRAM, ProbeModel, Verdict
from ovmstrio.inference.crash_probe.verdict_store import VerdictStore
from ovmstrio.isolation.program import signal_name
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess
from ovmstrio.util.load_limit import run_load

# Signals that a process causes itself; others, such as the OOM killer's, come from outside.
_CRASHES: Final = frozenset({"SIGFPE", "SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
# How long a process is kept for the next model: it takes a second to start, and has much memory.
_IDLE_SECONDS: Final = 3.0
_CLOSE_SECONDS: Final = 2.0


class ProbeCrashed(Exception):
    """The probing process ended with the signal ``name`` during the operation ``operation``."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(name)
        self.name = name
        self.operation = operation


class ProbeWorker:
    """Worker process; ``is_used`` is True after its first use."""

    def __init__(self) -> None:
        self.worker = WorkerProcess(PROGRAM)
        self.is_used = False
        self._taken = trio.Event()

    def put_back(self) -> trio.Event:
        """Mark the worker idle; return the event that is set when it is taken again."""
        self.is_used = True
        self._taken = trio.Event()
        return self._taken

    async def take(self, nursery: trio.Nursery) -> None:
        """Take the worker, starting it at first use; raise NotReady if it cannot be started."""
        self._taken.set()
        if self.worker.pid is not None:
            return
        try:
            await self.worker.start(nursery, None)
        except (OSError, WorkerExited) as error:
            raise NotReady(f"crash probe worker not started: {error}") from error

    async def do(self, trial: ProbeModel, operations: Sequence[str]) -> None:
        """Run several operations on a model; raise ConfigError if it cannot be compiled. See :meth:`ask`."""
        for operation in operations:
            problems = await self.ask(trial, operation)
            if problems:
                raise ConfigError([Problem(**problem) for problem in problems])

    async def ask(self, trial: ProbeModel, operation: str, **details: Any) -> Any:
        """Run one operation on a model and return its answer.

        Raises:
            Crashed: the process ended with a signal that it caused.
            NotReady: the process ended for another reason.
        """
        request = {
            **asdict(trial),
            "path": str(trial.path),
            "source": str(trial.source),
            **details,
            "operation": operation,
        }
        try:
            return await self.worker.call(request)
        except WorkerExited as error:
            await self.worker.ended.wait()
            status = self.worker.status or 0
            if status < 0 and signal_name(-status) in _CRASHES:
                raise ProbeCrashed(signal_name(-status), operation) from error
            raise NotReady(f"crash probe of model {trial.name!r} failed: the worker process {error.why}") from error


class ProbeWorkerPool:
    """Pool of idle worker processes, which starts new ones on demand."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._idle: list[ProbeWorker] = []

    @asynccontextmanager
    async def lend(self, *, is_new: bool = False) -> AsyncIterator[ProbeWorker]:
        """Provide a worker, an unused one if ``is_new``, and keep it for the next model unless it has ended."""
        sound = [process for process in self._idle if not (is_new or process.worker.is_retired)]
        process = sound[-1] if sound else ProbeWorker()
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

    def _keep(self, process: ProbeWorker) -> None:
        self._idle.append(process)
        self._nursery.start_soon(self._dismiss_when_idle, process, process.put_back())

    async def _dismiss_when_idle(self, process: ProbeWorker, taken: trio.Event) -> None:
        with trio.move_on_after(_IDLE_SECONDS):
            await taken.wait()
        if not taken.is_set():
            self._idle.remove(process)
            await process.worker.close(_CLOSE_SECONDS)


log = structlog.get_logger(__name__)

LAYER_SEARCH_SECONDS: Final = 30.0
"""Timeout of the search for the layer that crashes."""


class CrashProbe:
    """Probes models that are not known to run.

    Args:
        nursery: hosts the processes.
        tries_again: whether to probe known crashing models once more.
        layer_seconds: timeout of the search for the layer that crashes; after it no layer is reported.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        memory: VerdictStore,
        *,
        tries_again: bool = False,
        layer_seconds: float = LAYER_SEARCH_SECONDS,
    ) -> None:
        self.token = trio.lowlevel.current_trio_token()  # token of the event loop, for threads
        self._memory = memory
        self._retries = tries_again
        self._layer_seconds = layer_seconds
        self._limiter = trio.CapacityLimiter(len(os.sched_getaffinity(0)))
        self._workers = ProbeWorkerPool(nursery)
        self._seen: set[str] = set()
        self._locks: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()

    async def try_model(self, trial: ProbeModel) -> Verdict:
        """Return the verdict on a model, from this or an earlier probe.

        Raises:
            ConfigError: the model crashes OpenVINO, or cannot be compiled.
            NotReady: the probe failed.
        """
        try:
            key = await run_load(lambda: self._memory.key_of(trial))
        except OSError as error:
            raise ConfigError([Problem(f"cannot be read: {error.strerror}", file=str(error.filename))]) from error
        lock = self._locks.setdefault(key, trio.Lock())
        async with lock:
            verdict = await run_load(lambda: self._memory.recall(key))
            if verdict is not None and verdict.crash and self._retries and key not in self._seen:
                verdict = None
            remembered = verdict is not None
            if verdict is None:
                verdict = await self._probe(trial)
                new = verdict
                await run_load(lambda: self._memory.remember(key, new))
            self._seen.add(key)
        if verdict.crash:
            raise verdict.refusal(trial, self._memory.path_of(key) if remembered else None)
        if (remark := verdict.remark(trial)) is not None:
            log.warning("model crashes on zeros", model=trial.name, reason=str(remark))
        return verdict

    async def _probe(self, trial: ProbeModel) -> Verdict:
        """Run a model on ones, then on zeros; a crash on zeros is reported only."""
        log.info("crash probe started", model=trial.name, path=str(trial.source))
        verdict = Verdict(day=datetime.now(UTC).date().isoformat())
        async with self._limiter:
            crashed = await self._crash_of(trial, "load", "zeros", "forget")
            if crashed is None:
                return verdict
            # Heap corruption shows only when memory is freed.
            on_ones = crashed if crashed.operation == "load" else await self._crash_of(trial, "load", "forget")
            if on_ones is not None:
                return replace(verdict, crash=on_ones.name, layer=await self._layer(trial, 1))
            return replace(verdict, zeros_crash=crashed.name, zeros_layer=await self._layer(trial, 0))

    async def _crash_of(self, trial: ProbeModel, *operations: str) -> ProbeCrashed | None:
        for is_new in (False, True):
            try:
                async with self._workers.lend(is_new=is_new) as process:
                    may_be_corrupted = process.is_used
                    await process.do(trial, operations)
            except ProbeCrashed as crash:
                # An earlier model may have corrupted a used process, so repeat in a new one.
                if not may_be_corrupted:
                    return crash
            else:
                return None
        return None

    async def _layer(self, trial: ProbeModel, value: int) -> str:
        """Return the layer that crashes on inputs of a value: the last one of the shortest prefix that crashes."""
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
            except (ProbeCrashed, NotReady):
                return ""
        return ""

    async def _crashes(self, trial: ProbeModel, count: int, value: int) -> bool:
        try:
            async with self._workers.lend() as process:
                await process.ask(trial, "part", count=count, value=value)
        except ProbeCrashed:
            return True
        return False


ProbeMode = Literal["auto", "off", "again"]
"""Probe of unknown models: on, off, or on with one more attempt for models that crashed before."""

# Only user code, which loads models in threads that reach the server through their context.
_of_user_code: Final[ContextVar[CrashProbe | None]] = ContextVar("crash probe of user code", default=None)


@contextmanager
def open_crash_probe(
    nursery: trio.Nursery, mode: ProbeMode, folder: Path | None, *, layer_seconds: float = LAYER_SEARCH_SECONDS
) -> Iterator[CrashProbe | None]:
    """Provide a crash probe, also to user code of tasks that start in the block; None if the mode is ``off``.

    ``folder`` stores verdicts, ``nursery`` hosts workers.
    """
    if mode == "off":
        yield None
        return
    probe = CrashProbe(nursery, VerdictStore(folder), tries_again=mode == "again", layer_seconds=layer_seconds)
    before = _of_user_code.set(probe)
    try:
        yield probe
    finally:
        _of_user_code.reset(before)


def crash_probe_of_user_code() -> CrashProbe | None:
    """Return the crash probe for models that user code loads; None if there is none."""
    return _of_user_code.get()


def probe_model_from_thread(trial: ProbeModel) -> None:
    """Probe a model that user code loads in a worker thread; loads on the event loop are not probed.

    Raises:
        ConfigError: the model crashes OpenVINO, or cannot be compiled.
        NotReady: the probe failed.
    """
    probe = _of_user_code.get()
    if probe is not None and not trio.lowlevel.in_trio_run():
        trio.from_thread.run(probe.try_model, trial, trio_token=probe.token)
