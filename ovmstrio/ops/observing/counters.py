"""Counters of a running pipeline: totals since start, tracer windows, and the newest values for the live view."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.service import NodeCounters
from ovmstrio.ops.observing.hooks import STAGES, UNKNOWN_CALLER, Caller, ChannelState, OpHooks, Span, Stage

_MAX_NEWEST: Final = 1024


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile of ascending values; 0 without values."""
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0


@dataclass(slots=True)
class OpCounters:
    """Counters of one Op: seconds and calls by stage, processed samples, and batch sizes."""

    seconds: dict[Stage, float] = field(default_factory=dict)
    counts: dict[Stage, int] = field(default_factory=dict)
    inferred: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    deaths: int = 0

    def average(self, stage: Stage) -> float:
        """Average seconds of a stage."""
        return self.seconds[stage] / self.counts[stage] if stage in self.counts else 0.0

    @property
    def idle(self) -> float:
        """Share of time in which the Op did no work, from the average stage times."""
        averages = {stage: self.average(stage) for stage in STAGES}
        total = sum(averages.values())
        return 1 - (averages["prep"] + averages["midp"] + averages["postp"]) / total if total else 0.0


@dataclass(slots=True)
class RequestCounters:
    """Counters of requests: seconds of answered ones, ids of failed ones, and number of disconnected clients."""

    seconds: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    left: int = 0
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Number of answered requests."""
        return len(self.seconds)


@dataclass(slots=True)
class CounterWindow:
    """Counters of one tracer interval."""

    began: float
    ops: dict[str, OpCounters] = field(default_factory=dict)
    requests: RequestCounters = field(default_factory=RequestCounters)


def null_node_hooks(_op: str) -> NodeHooks:
    """Return hooks that ignore everything."""
    return NULL_NODE_HOOKS


class PipelineCounters(OpHooks):
    """Counters of one pipeline, updated by executor hooks; ``tallies`` holds statistics of batches by Op.

    ``keeps_window`` fills tracer windows, which grow until taken.  ``hooks_of`` returns additional hooks for an Op.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps_window: bool = True,
        hooks_of: Callable[[str], NodeHooks] = null_node_hooks,
    ) -> None:
        self._clock = clock
        self._hooks_of = hooks_of
        self.tallies: dict[str, NodeCounters] = {}
        self._keeps_window = keeps_window
        self.began = clock()
        self.running = 0
        self.codes: Counter[int] = Counter()
        self.left = 0
        self.seconds = 0.0
        self._package_hooks: dict[str, OpCounters] = {}
        self.totals: dict[str, OpCounters] = {}
        self.newest: dict[tuple[str, Stage], deque[float]] = {}
        self.newest_requests: deque[tuple[float, float]] = deque(maxlen=_MAX_NEWEST)
        self._window = CounterWindow(self.began)
        self._channels: Callable[[], Sequence[ChannelState]] = tuple

    @property
    def now(self) -> float:
        """Current time in seconds."""
        return self._clock()

    @property
    def totals_with_package_hooks(self) -> dict[str, OpCounters]:
        """Totals of the Ops, and of RequestOp and ResponseOp under their common name."""
        return {**self._package_hooks, **self.totals}

    @property
    def channels(self) -> Sequence[ChannelState]:
        """Current state of the channels."""
        return self._channels()

    def take_window(self) -> CounterWindow:
        """Return the current window and start a new one."""
        taken, self._window = self._window, CounterWindow(self.now)
        return taken

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Start counters for these Ops."""
        self.totals = {op: OpCounters() for op in ops}
        self.tallies = {op: NodeCounters(self._hooks_of(op)) for op in ops}
        self._channels = channels

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
        """Count a started request."""
        del data_id, log_id, profile, caller
        self.running += 1

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:  # noqa: ARG002 - the hook has it
        """Count a stage; stages of RequestOp and ResponseOp have separate totals."""
        seconds = span[1] - span[0]
        is_op = op in self.totals
        totals = self.totals if is_op else self._package_hooks
        if op not in totals:
            totals[op] = OpCounters()
        counters = [totals[op]]
        if is_op and self._keeps_window:
            counters.append(self._window.ops.setdefault(op, OpCounters()))
        for figures in counters:
            figures.seconds[stage] = figures.seconds.get(stage, 0.0) + seconds
            figures.counts[stage] = figures.counts.get(stage, 0) + 1
            if stage == "midp":
                figures.inferred += len(data_ids)
        if not is_op:
            return
        key = (op, stage)
        if key not in self.newest:
            self.newest[key] = deque(maxlen=_MAX_NEWEST)
        self.newest[key].append(seconds)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:  # noqa: ARG002 - the hook has it
        """Count a started batch."""
        if op in self.totals:
            self.tallies[op].begin()
            self.totals[op].batches[len(data_ids)] += 1
            if self._keeps_window:
                self._window.ops.setdefault(op, OpCounters()).batches[len(data_ids)] += 1

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:  # noqa: ARG002 - the hook has it
        """Count a finished batch."""
        tally = self.tallies.get(op)
        if tally is None:
            return
        if failed is None:
            tally.left()
        elif failed:
            tally.failed(begun)
        else:
            tally.succeeded(begun)

    def worker_died(self, op: str, worker: int, reason: str) -> None:  # noqa: ARG002 - the hook has it
        """Count an unexpected worker exit."""
        if op in self.totals:
            self.totals[op].deaths += 1

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Count a finished request."""
        del log_id, message
        self.running -= 1
        if code is None:
            self.left += 1
        else:
            self.codes[code] += 1
            self.seconds += span[1] - span[0]
            self.newest_requests.append((span[1], span[1] - span[0]))
        if self._keeps_window:
            _count_end(self._window.requests, data_id, code, span[1] - span[0])


def _count_end(requests: RequestCounters, data_id: int, code: int | None, seconds: float) -> None:
    if code is None:
        requests.left += 1
        return
    requests.codes[code] += 1
    requests.seconds.append(seconds)
    if code:
        requests.failed.append(data_id)
