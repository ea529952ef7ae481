"""What the executor reports while requests run.

Every time is in seconds of ``time.perf_counter``, which processes of one machine share.  Hooks are called on trio's
thread, must be quick, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["NOBODY", "NULL", "STAGES", "Asker", "ChannelState", "OpHooks", "Several", "Span", "Stage"]

Asker = tuple[str, str]
"""Whose request it is, and which method it names; empty where that is not known."""

NOBODY: Final[Asker] = ("", "")

Span = tuple[float, float]
"""When something began and ended."""

Stage = Literal["in", "prep", "midp", "postp", "out", "prepack", "postpack"]
"""``in`` waits for input, ``out`` hands on; ``prepack`` and ``postpack`` are the RequestOp's and the ResponseOp's."""

STAGES: Final[tuple[Stage, ...]] = ("in", "prep", "midp", "postp", "out")
"""The stages of an Op, in order."""


@dataclass(frozen=True, slots=True)
class ChannelState:
    """What waits between Ops: samples in ``size``, at most ``capacity``, which is 0 for any number."""

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    size: int
    capacity: int = 0


class OpHooks:
    """An observer of one running pipeline; takes no note of what it does not override.

    Attributes:
        wants_stages: whether it is told of stages now; most calls are about these.
    """

    wants_stages: bool = True

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Take note that Ops run; ``channels`` tells at any time what waits between them."""

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False, caller: Asker = NOBODY) -> None:
        """Take note that a request is worked on; with ``profile`` its timeline will be asked for."""

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Take note of one stage of one worker, which concerned these samples."""

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Take note of the samples that a worker takes together."""

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:
        """Take note of the end of what ``batch`` told of: whether a sample failed; None if nobody waits for it."""

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Take note of a worker that ended by itself; another takes its place."""

    def timeline(self, data_id: int) -> str:  # noqa: ARG002 - a request of which this keeps none has none
        """Give the timeline of a request that is still to be finished; empty where none is kept."""
        return ""

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Take note of a request's end: ``code`` is its ``err_no``, None if the client left; ``message`` its text."""


class Several(OpHooks):
    """Passes everything on to several observers, as far as they take note of it.

    Args:
        observers: whom to tell, in this order.
    """

    def __init__(self, *observers: OpHooks) -> None:
        def listeners(name: str) -> tuple[Any, ...]:
            return tuple(
                getattr(one, name) for one in observers if getattr(type(one), name) is not getattr(OpHooks, name)
            )

        self._opened = listeners("opened")
        self._request_started = listeners("request_started")
        self._of_stages = [one for one in observers if type(one).stage is not OpHooks.stage]
        self._batch = listeners("batch")
        self._batch_ended = listeners("batch_ended")
        self._worker_died = listeners("worker_died")
        self._timeline = listeners("timeline")
        self._request_finished = listeners("request_finished")

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Tell that Ops run."""
        for each in self._opened:
            each(ops, channels)

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False, caller: Asker = NOBODY) -> None:
        """Tell that a request is worked on."""
        for each in self._request_started:
            each(data_id, log_id, profile=profile, caller=caller)

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Tell of one stage."""
        for each in self._of_stages:
            if each.wants_stages:
                each.stage(op, worker, stage, data_ids, span)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Tell of one batch."""
        for each in self._batch:
            each(op, worker, data_ids)

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:
        """Tell of the end of a batch."""
        for each in self._batch_ended:
            each(op, worker, begun, failed=failed)

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Tell that a worker ended by itself."""
        for each in self._worker_died:
            each(op, worker, reason)

    def timeline(self, data_id: int) -> str:
        """Give the timeline of the observer that keeps it."""
        return next((text for each in self._timeline if (text := each(data_id))), "")

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Tell of a request's end."""
        for each in self._request_finished:
            each(data_id, log_id, code, span, message)


NULL: Final[OpHooks] = OpHooks()
"""Nobody is told."""
