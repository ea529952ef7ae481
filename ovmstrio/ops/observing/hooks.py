"""Executor hooks: events of requests, stages, batches and workers.

Times are seconds of ``time.perf_counter``, which all processes of a machine share.  Hooks run on trio's thread, must
be quick, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Caller = tuple[str, str]
"""Client and method of a request; empty if unknown."""

UNKNOWN_CALLER: Final[Caller] = ("", "")

Span = tuple[float, float]
"""Begin and end time."""

Stage = Literal["in", "prep", "midp", "postp", "out", "prepack", "postpack"]
"""``in`` waits for input, ``out`` forwards; ``prepack`` and ``postpack`` belong to RequestOp and ResponseOp."""

STAGES: Final[tuple[Stage, ...]] = ("in", "prep", "midp", "postp", "out")
"""Stages of an Op, in order."""


@dataclass(frozen=True, slots=True)
class ChannelState:
    """State of a channel between Ops; a capacity of 0 means no limit."""

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    size: int
    capacity: int = 0


class OpHooks:
    """Hooks of one running pipeline; the defaults ignore all events.

    ``wants_stages`` tells whether to call ``stage``, the most frequent event.
    """

    wants_stages: bool = True

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Handle the start of Ops; ``channels`` returns the current state of the channels."""

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Handle the start of a request; with ``profile`` the timeline will be requested."""

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Handle one stage of one worker for the given samples."""

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Handle the start of a batch."""

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:
        """Handle the end of a batch: whether a sample failed, or None if all requests were cancelled."""

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Handle an unexpected worker exit; the worker is replaced."""

    def timeline(self, data_id: int) -> str:  # noqa: ARG002 - hook signature
        """Return the timeline of an unfinished request; empty if none is recorded."""
        return ""

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Handle the end of a request with its ``err_no``, or None if the client disconnected, and its ``err_msg``."""


class CompositeHooks(OpHooks):
    """Composite that forwards events, in order, to the observers that override their hook."""

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
        """Forward the event."""
        for each in self._opened:
            each(ops, channels)

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Forward the event."""
        for each in self._request_started:
            each(data_id, log_id, profile=profile, caller=caller)

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        """Forward the event."""
        for each in self._of_stages:
            if each.wants_stages:
                each.stage(op, worker, stage, data_ids, span)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Forward the event."""
        for each in self._batch:
            each(op, worker, data_ids)

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:
        """Forward the event."""
        for each in self._batch_ended:
            each(op, worker, begun, failed=failed)

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Forward the event."""
        for each in self._worker_died:
            each(op, worker, reason)

    def timeline(self, data_id: int) -> str:
        """Return the first timeline of the observers."""
        return next((text for each in self._timeline if (text := each(data_id))), "")

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Forward the event."""
        for each in self._request_finished:
            each(data_id, log_id, code, span, message)


NULL_HOOKS: Final[OpHooks] = OpHooks()
"""Hooks that ignore all events."""
