"""Recovery after a failed inference: detection of tainted runs, model replacement and stream recovery.

A failure leaves an OpenVINO stream in a state in which other requests fail or return wrong numbers
(``docs/openvino_defects.md``). A result is therefore returned only if no run started before it has failed; tainted runs
are repeated after recovery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import openvino as ov
import structlog
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.inference.infer_requests import CompletionQueue, Slot
from ovmstrio.util.backoff import Backoff

log = structlog.get_logger(__name__)


class TaintedRunError(Exception):
    """A run ended, with any result, after another run failed; it must be repeated."""


@dataclass(eq=False, slots=True)
class Run:
    """One inference; ``is_culprit`` marks a failure on a healthy model, which the task that started it must recover."""

    slot: Slot
    done: trio.Event
    generation: int
    is_culprit: bool = False


class RunTracker:
    """Inferences on the device, in start order; used on the event loop only."""

    def __init__(self, ends: CompletionQueue, *, may_fail: bool) -> None:
        self._ends = ends
        self._may_fail = may_fail
        self._running: dict[Run, None] = {}
        self._generation = 0
        self._recovered: trio.Event | None = None

    @property
    def is_healthy(self) -> bool:
        """Return whether no failure is waiting for recovery."""
        return self._recovered is None

    @property
    def alone(self) -> bool:
        """Return whether at most one inference runs."""
        return len(self._running) <= 1

    async def wait_healthy(self) -> None:
        """Wait until the model is healthy."""
        if self._recovered is not None:
            await self._recovered.wait()

    def start(self, slot: Slot) -> Run:
        """Start an inference with the inputs bound to the slot; raise ModelFailure if OpenVINO refused to start it."""
        run = Run(slot, slot.start(self._ends), self._generation)
        self._running[run] = None
        return run

    def end(self, run: Run) -> None:
        """Remove an inference that has ended."""
        self._running.pop(run, None)
        if not run.slot.ended_at:
            # OpenVINO calls back neither for a failed nor for a cancelled run.
            self._ends.miss()

    def check(self, run: Run) -> None:
        """Check that the result of a finished run is valid; raise SuspectRunError if an earlier run failed."""
        if not self._may_fail or run.is_culprit:
            return
        if run.generation != self._generation:
            raise TaintedRunError
        for earlier in self._running:
            if earlier is run:
                return
            if earlier.slot.has_failed():
                self.mark_failed(earlier)
                raise TaintedRunError

    def mark_failed(self, is_culprit: Run | None = None) -> None:
        """Mark the model as failed; nothing may start until :meth:`mended`."""
        if self._recovered is None:
            self._generation += 1
            self._recovered = trio.Event()
            if is_culprit is not None:
                is_culprit.is_culprit = True
                is_culprit.done.set()

    def mended(self) -> None:
        """Mark the model as healthy or replaced."""
        if self._recovered is not None:
            self._recovered.set()
            self._recovered = None


def replace_model(slots: Sequence[Slot], compile_replacement: Callable[[], ov.CompiledModel]) -> None:
    """Attach all requests to a recompiled model; if compilation fails, they reject every input. Blocks."""
    try:
        model = compile_replacement()
    except ConfigError as error:
        log.exception("failed model not reloaded", reason=error.message)
        for slot in slots:
            slot.broken = error.message
        return
    for slot in slots:
        slot.attach(model)
        slot.unbind()


_FIRST_SECONDS: Final = 30.0
_MAX_SECONDS: Final = 3600.0
_STABLE_SECONDS: Final = 600.0
# After this time without failure the back-off starts again from its first pause.


class StreamRecoveryTimer:
    """Back-off timer for restoring the streams that a model gave up after a failure."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_SECONDS, _MAX_SECONDS, _STABLE_SECONDS)
        self._restored_at = clock()
        self._pause = 0.0
        self._due_at = math.inf

    @property
    def are_lost(self) -> bool:
        """Return whether the model runs on one stream instead of several."""
        return self._pause > 0

    @property
    def is_due(self) -> bool:
        """Return whether the streams should be restored now."""
        return self.are_lost and self._clock() >= self._due_at

    def lose(self) -> float:
        """Start the timer after streams were given up or not restored; return the seconds until they are due."""
        now = self._clock()
        self._pause = self._backoff.seconds_after(0.0 if self.are_lost else now - self._restored_at)
        self._due_at = now + self._pause
        return self._pause

    def restart(self) -> None:
        """Restart the timer after another failure, if it is running."""
        if self.are_lost:
            self._due_at = self._clock() + self._pause

    def clear(self) -> None:
        """Clear the timer after the streams were restored."""
        if self.are_lost:
            self._pause, self._due_at, self._restored_at = 0.0, math.inf, self._clock()
