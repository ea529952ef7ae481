"""Models that are not known to run: tried in worker processes, several side by side, until there is a verdict."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from weakref import WeakValueDictionary

import structlog
import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem
from ovmstrio.openvino.trials.memory import TrialMemory
from ovmstrio.openvino.trials.trial import Trial, Verdict
from ovmstrio.openvino.trials.trial_workers import Crashed, TrialWorkers
from ovmstrio.work.placement import run_load

__all__ = ["TrialPool"]

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
