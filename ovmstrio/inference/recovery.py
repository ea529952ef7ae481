"""Requests that share a stream with one that failed: which of them may be believed, and when all is well again.

A failure leaves a stream of OpenVINO's in a state in which others' requests fail or get wrong numbers
(``docs/openvino_defects.md``).  So an answer is given only if nothing that was started before it has failed; what ran
beside or behind a failure runs again, once the model is mended.
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

__all__ = ["LostStreams", "Run", "Runs", "SuspectRunError", "replace_model"]

# ----------------------------------------------------------------------
# Requests that share a stream with one that failed: which of them may be believed, and when all is well again
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


class SuspectRunError(Exception):
    """A run ended, in whichever way, behind one that failed; it has to be made again."""


@dataclass(eq=False, slots=True)
class Run:
    """One inference on the device.

    ``culprit`` tells that it failed on a sound model, so that whoever started it has to mend that.
    """

    slot: Slot
    done: trio.Event
    generation: int
    culprit: bool = False


class Runs:
    """The inferences on the device, in the order in which they were started; belongs to the event loop.

    Args:
        ends: hears of their ends.
        may_fail: whether a valid request may fail.
    """

    def __init__(self, ends: CompletionQueue, *, may_fail: bool) -> None:
        self._ends = ends
        self._may_fail = may_fail
        self._running: dict[Run, None] = {}
        self._generation = 0
        self._mended: trio.Event | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing has failed that is not mended."""
        return self._mended is None

    @property
    def alone(self) -> bool:
        """Whether at most one inference runs."""
        return len(self._running) <= 1

    async def wait_sound(self) -> None:
        """Return when the model is mended.

        Cancellation: at once.
        """
        if self._mended is not None:
            await self._mended.wait()

    def start(self, slot: Slot) -> Run:
        """Start an inference with the inputs that the slot has.

        Raises:
            ModelFailure: OpenVINO refuses to.
        """
        run = Run(slot, slot.start(self._ends), self._generation)
        self._running[run] = None
        return run

    def end(self, run: Run) -> None:
        """Forget an inference that has ended."""
        self._running.pop(run, None)
        if not run.slot.ended_at:
            # It has failed, or was cancelled, and OpenVINO will say nothing of it to those who wait for its end.
            self._ends.miss()

    def check(self, run: Run) -> None:
        """Hold that a run that has ended may be believed.

        Raises:
            SuspectRunError: it may not.
        """
        if not self._may_fail or run.culprit:
            return
        if run.generation != self._generation:
            raise SuspectRunError
        for earlier in self._running:
            if earlier is run:
                return
            if earlier.slot.has_failed():
                self.spoil(earlier)
                raise SuspectRunError

    def spoil(self, culprit: Run | None = None) -> None:
        """Say that the model has failed; nothing may start until :meth:`mended`."""
        if self._mended is None:
            self._generation += 1
            self._mended = trio.Event()
            if culprit is not None:
                culprit.culprit = True
                culprit.done.set()

    def mended(self) -> None:
        """Say that the model is as good as new, or replaced."""
        if self._mended is not None:
            self._mended.set()
            self._mended = None


def replace_model(slots: Sequence[Slot], compile_again: Callable[[], ov.CompiledModel]) -> None:
    """Give all requests of a model another one; where none can be had, they refuse everything.  Blocks."""
    try:
        model = compile_again()
    except ConfigError as error:
        log.exception("failed model cannot be loaded again", reason=error.message)
        for slot in slots:
            slot.broken = error.message
        return
    for slot in slots:
        slot.attach(model)
        slot.unbind()


# ----------------------------------------------------------------------
# Streams that a model gave up for one after a failure: when it is to have them again
# ----------------------------------------------------------------------

_FIRST_SECONDS: Final = 30.0
_LONGEST_SECONDS: Final = 3600.0
_STABLE_SECONDS: Final = 600.0
"""Who fails less often than that is forgiven each time as if it were the first one."""


class LostStreams:
    """Tells when nothing has failed for long enough: longer each time that they were lost soon after.

    Args:
        clock: gives seconds.
    """

    __slots__ = ("_backoff", "_clock", "_due_at", "_had_since", "_pause")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_SECONDS, _LONGEST_SECONDS, _STABLE_SECONDS)
        self._had_since = clock()
        self._pause = 0.0
        self._due_at = math.inf

    @property
    def are_lost(self) -> bool:
        """Whether the model has one stream in the place of several."""
        return self._pause > 0

    @property
    def are_due(self) -> bool:
        """Whether it is to have them again now."""
        return self.are_lost and self._clock() >= self._due_at

    def lose(self) -> float:
        """Note that they are given up, or could not be had again; gives how long nothing must fail until they are due.

        Returns:
            Seconds.
        """
        now = self._clock()
        self._pause = self._backoff.seconds_after(0.0 if self.are_lost else now - self._had_since)
        self._due_at = now + self._pause
        return self._pause

    def put_off(self) -> None:
        """Note a failure while they are lost: the time begins again."""
        if self.are_lost:
            self._due_at = self._clock() + self._pause

    def regain(self) -> None:
        """Note that the model has them."""
        if self.are_lost:
            self._pause, self._due_at, self._had_since = 0.0, math.inf, self._clock()
