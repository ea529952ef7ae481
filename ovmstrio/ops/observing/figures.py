"""What is counted of a running pipeline: sums since it started, since the last look, and the newest values.

The tracer takes windows of these figures; the live view reads the newest values.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Final

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.service import NodeTally
from ovmstrio.ops.observing.hooks import NOBODY, STAGES, Asker, ChannelState, OpHooks, Span, Stage

__all__ = [
    "PIPELINE",
    "SAMPLES",
    "OpFigures",
    "PipelineFigures",
    "RequestFigures",
    "Window",
    "current_ids",
    "names_of_code",
    "no_hooks",
    "percentile",
    "working_on",
]

SAMPLES: Final[ContextVar[tuple[tuple[int, int], ...]]] = ContextVar("samples", default=())
"""Data id and log id of each sample that the current task or thread works on, for all that is logged meanwhile."""

PIPELINE: Final[ContextVar[str]] = ContextVar("pipeline", default="")
"""The name of the pipeline that the current task or thread works for; empty for none."""


def names_of_code(op: str) -> dict[str, str]:
    """Give the names that an Op's code has in the log of what it prints."""
    pipeline = PIPELINE.get()
    return {"servable": pipeline, "op": op} if pipeline else {"op": op}


class working_on:  # noqa: N801 - it is called as a function, and a class is entered with half the calls
    """Name samples by data id and log id in all that is logged meanwhile; trio's threads take it over by themselves."""

    __slots__ = ("_samples", "_token")

    def __init__(self, *samples: tuple[int, int]) -> None:
        self._samples = samples

    def __enter__(self) -> None:
        self._token: Token[tuple[tuple[int, int], ...]] = SAMPLES.set(self._samples)

    def __exit__(self, *_: object) -> None:
        SAMPLES.reset(self._token)


def current_ids() -> str:
    """Give the ids as a log line has them, such as ``(data_id=1 log_id=0)``; empty outside requests."""
    return " ".join(f"(data_id={data_id} log_id={log_id})" for data_id, log_id in SAMPLES.get())


_NEWEST: Final = 1024


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Give the value below which so many percent of ascending values are, 0 where there are none."""
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0


@dataclass(slots=True)
class OpFigures:
    """One Op's: seconds and number of each stage, how many samples were processed, and how large its batches were."""

    seconds: dict[Stage, float] = field(default_factory=dict)
    counts: dict[Stage, int] = field(default_factory=dict)
    inferred: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    deaths: int = 0

    def average(self, stage: Stage) -> float:
        """How many seconds the stage took on average."""
        return self.seconds[stage] / self.counts[stage] if stage in self.counts else 0.0

    @property
    def idle(self) -> float:
        """Which share of its time the Op did not work, by the averages of its stages."""
        averages = {stage: self.average(stage) for stage in STAGES}
        total = sum(averages.values())
        return 1 - (averages["prep"] + averages["midp"] + averages["postp"]) / total if total else 0.0


@dataclass(slots=True)
class RequestFigures:
    """The requests': seconds of each that was answered, ids of those that failed, and how many left."""

    seconds: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    left: int = 0
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """How many were answered."""
        return len(self.seconds)


@dataclass(slots=True)
class Window:
    """The figures from one look to the next."""

    began: float
    ops: dict[str, OpFigures] = field(default_factory=dict)
    requests: RequestFigures = field(default_factory=RequestFigures)


def no_hooks(_op: str) -> NodeHooks:
    """Tell nobody else of the runs of an Op."""
    return NULL_NODE_HOOKS


class PipelineFigures(OpHooks):
    """Counts what the executor reports; an observer of one pipeline.

    Args:
        clock: gives the time in seconds.
        keeps_window: whether somebody takes windows, which grow until they are taken.
        hooks_of: gives who else is told of the runs of an Op.

    Attributes:
        tallies: what each Op has done, where a run is a batch.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps_window: bool = True,
        hooks_of: Callable[[str], NodeHooks] = no_hooks,
    ) -> None:
        self._clock = clock
        self._hooks_of = hooks_of
        self.tallies: dict[str, NodeTally] = {}
        self._keeps_window = keeps_window
        self.began = clock()
        self.running = 0
        self.codes: Counter[int] = Counter()
        self.left = 0
        self.seconds = 0.0
        self._package_hooks: dict[str, OpFigures] = {}
        self.totals: dict[str, OpFigures] = {}
        self.newest: dict[tuple[str, Stage], deque[float]] = {}
        self.newest_requests: deque[tuple[float, float]] = deque(maxlen=_NEWEST)
        self._window = Window(self.began)
        self._channels: Callable[[], Sequence[ChannelState]] = tuple

    @property
    def now(self) -> float:
        """The time."""
        return self._clock()

    @property
    def with_ends(self) -> dict[str, OpFigures]:
        """The totals of the Ops, and those of the RequestOp and the ResponseOp under the name that they share."""
        return {**self._package_hooks, **self.totals}

    @property
    def channels(self) -> Sequence[ChannelState]:
        """What waits between Ops now."""
        return self._channels()

    def take_window(self) -> Window:
        """Give the figures since the last look, and begin anew."""
        taken, self._window = self._window, Window(self.now)
        return taken

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Begin to count for these Ops."""
        self.totals = {op: OpFigures() for op in ops}
        self.tallies = {op: NodeTally(self._hooks_of(op)) for op in ops}
        self._channels = channels

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False, caller: Asker = NOBODY) -> None:
        """Count a request in."""
        del data_id, log_id, profile, caller
        self.running += 1

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:  # noqa: ARG002 - the hook has it
        """Count one stage of an Op; those of RequestOp and ResponseOp are in the requests' times."""
        seconds = span[1] - span[0]
        is_op = op in self.totals
        of_all = self.totals if is_op else self._package_hooks
        if op not in of_all:
            of_all[op] = OpFigures()
        counting = [of_all[op]]
        if is_op and self._keeps_window:
            counting.append(self._window.ops.setdefault(op, OpFigures()))
        for figures in counting:
            figures.seconds[stage] = figures.seconds.get(stage, 0.0) + seconds
            figures.counts[stage] = figures.counts.get(stage, 0) + 1
            if stage == "midp":
                figures.inferred += len(data_ids)
        if not is_op:
            return
        key = (op, stage)
        if key not in self.newest:
            self.newest[key] = deque(maxlen=_NEWEST)
        self.newest[key].append(seconds)

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:  # noqa: ARG002 - the hook has it
        """Count one batch."""
        if op in self.totals:
            self.tallies[op].begin()
            self.totals[op].batches[len(data_ids)] += 1
            if self._keeps_window:
                self._window.ops.setdefault(op, OpFigures()).batches[len(data_ids)] += 1

    def batch_ended(self, op: str, worker: int, begun: float, *, failed: bool | None) -> None:  # noqa: ARG002 - the hook has it
        """Count the end of a batch."""
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
        """Count a worker that ended by itself."""
        if op in self.totals:
            self.totals[op].deaths += 1

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Count a request out."""
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


def _count_end(requests: RequestFigures, data_id: int, code: int | None, seconds: float) -> None:
    if code is None:
        requests.left += 1
        return
    requests.codes[code] += 1
    requests.seconds.append(seconds)
    if code:
        requests.failed.append(data_id)
