"""Requests that share a stream with one that failed: which of them may be believed, and when all is well again.

A failure leaves a stream of OpenVINO's in a state in which others' requests fail or get wrong numbers
(``docs/openvino_defects.md``).  So an answer is given only if nothing that was started before it has failed; what ran
beside or behind a failure runs again, once the model is mended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import openvino as ov
import structlog
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.completions import CompletionQueue
from ovmstrio.openvino.slot import Slot

__all__ = ["Run", "Runs", "SuspectRunError", "replace_model"]

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
