"""Random pipelines of Ops, what their requests meet on the way, and what each of them may end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, Literal

import numpy as np
import trio

from ovmstrio.ops import Op, RequestOp, ResponseOp
from ovmstrio.runtimes.ops.config.op_settings import DagSettings, OpSettings, PipelineSettings
from ovmstrio.runtimes.ops.graph import OpGraph, build
from ovmstrio.runtimes.ops.observing.hooks import NOBODY, Asker, ChannelState, OpHooks, Span, Stage
from ovmstrio.runtimes.ops.op import EXECUTOR_NAME

LIMIT: Final = 0.1
"""How long an attempt of ``process`` may take, where it is limited."""

EPSILON: Final = 1e-6
PRODUCT_CODE: Final = 777
HARD: Final = {"raise": 10000, "product": PRODUCT_CODE, "process": 10000, "code": 9000}

Outcome = tuple[int, str]


@dataclass(frozen=True)
class Fault:
    """What a request meets in an Op; ``times`` is how many attempts of ``process`` are late."""

    kind: Literal["raise", "product", "process", "code", "late", "skip"]
    times: int = 0


@dataclass(frozen=True)
class OpPlan:
    """One Op: its inputs, its settings in milliseconds, and the seconds that its hooks take."""

    name: str
    inputs: tuple[str, ...]
    concurrency: int
    batch_size: int
    batch_timeout: int
    timeout: int
    retry: int
    seconds: tuple[float, float, float]
    has_process: bool

    @property
    def settings(self) -> OpSettings:
        return OpSettings(
            self.name, concurrency=self.concurrency, batch_size=self.batch_size, timeout=self.timeout,
            auto_batching_timeout=self.batch_timeout, retry=self.retry,
        )  # fmt: skip

    @property
    def waits_for_others(self) -> bool:
        return self.batch_size > 1 and self.batch_timeout <= 0

    @property
    def longest(self) -> float:
        attempts = 2 * self.retry * (LIMIT if self.timeout > 0 else self.seconds[1])
        return max(0, self.batch_timeout) / 1000 + self.seconds[0] + attempts + self.seconds[2]


@dataclass(frozen=True)
class RequestPlan:
    """One request: when it comes, the rows of its feeds, when it leaves, its time, and its faults by Op."""

    at: float
    rows: int
    leaves: float | None
    deadline: float | None
    faults: Mapping[str, Fault]


@dataclass(frozen=True)
class Plan:
    """A pipeline and all of its requests; ``closes`` is when it is closed, None for when all have ended."""

    ops: Sequence[OpPlan]
    requests: Sequence[RequestPlan]
    worker_num: int
    channel_size: int
    takes_first: bool
    retry: int
    closes: float | None

    @property
    def settings(self) -> PipelineSettings:
        dag = DagSettings(
            channel_size=self.channel_size, channel_recv_frist_arrive=self.takes_first, retry=self.retry
        )  # fmt: skip
        return PipelineSettings(worker_num=self.worker_num, dag=dag, ops={op.name: op.settings for op in self.ops})

    @property
    def bound(self) -> float:
        work = len(self.requests) * self.retry * sum(op.longest for op in self.ops)
        return max(request.at + (request.deadline or 0) for request in self.requests) + work

    def late(self, op: OpPlan, number: int) -> int:
        fault = self.requests[number].faults.get(op.name)
        if fault is None or fault.kind != "late" or not op.has_process or op.timeout <= 0:
            return 0
        return fault.times

    def hard(self, op: OpPlan, number: int) -> int:
        fault = self.requests[number].faults.get(op.name)
        if fault is None or (fault.kind in {"process", "code"} and not op.has_process):
            return 0
        if fault.kind == "code" and op.batch_size > 1:
            return 0
        return HARD.get(fault.kind, 0)


@dataclass
class Watcher(OpHooks):
    """What Ops and hooks see while a plan is lived through."""

    plan: Plan
    late_left: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    started: Counter[int] = field(default_factory=Counter)
    finished: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for op in self.plan.ops:
            for number in range(len(self.plan.requests)):
                self.late_left[op.name, number] = self.plan.late(op, number)

    # An observer of the executor

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        """Take no note of it."""

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False, caller: Asker = NOBODY) -> None:
        self.started[data_id] += 1

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        if span[0] > span[1]:
            self.wrongs.append(f"{stage} of {op} ended before it began")

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        size = next(one.batch_size for one in self.plan.ops if one.name == op)
        if len(data_ids) > size or sorted(set(data_ids)) != list(data_ids):
            self.wrongs.append(f"a batch of {op} has the samples {data_ids}")

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        self.wrongs.append(reason)

    def timeline(self, data_id: int) -> str:
        return ""

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        self.finished[data_id] += 1


class _ModelOp(Op):
    """Does as planned; a request's number is its log id."""

    def __init__(self, plan: OpPlan, watcher: Watcher, inputs: Sequence[Op]) -> None:
        super().__init__(name=plan.name, input_ops=inputs)
        self.plan = plan
        self.watcher = watcher
        self.current = -1

    def fault(self, number: int) -> str:
        fault = self.watcher.plan.requests[number].faults.get(self.name)
        return fault.kind if fault is not None else ""

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        self.current = log_id
        await trio.sleep(self.plan.seconds[0])
        if self.fault(log_id) == "raise":
            raise RuntimeError("as planned")
        rows = self.watcher.plan.requests[log_id].rows
        return {"id": np.full((rows, 1), log_id)}, self.fault(log_id) == "skip", None, ""

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        await trio.sleep(self.plan.seconds[2])
        rows = self.watcher.plan.requests[log_id].rows
        if fetch_data["id"].tolist() != [[log_id]] * rows:
            self.watcher.wrongs.append(f"{self.name} got the rows of others for {log_id}")
        if self.plan.batch_size == 1 and self.current != log_id:
            self.watcher.wrongs.append(f"{self.name} worked on {log_id} and {self.current} at once")
        if self.fault(log_id) == "product":
            return {}, PRODUCT_CODE, "as planned"
        return {"x": _around(self.name, [one["x"] for one in input_dicts.values()])}


class _ProcessingOp(_ModelOp):
    """Does as planned, with something to process."""

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        numbers = set(feed_batch[0]["id"].ravel().tolist())
        late = [number for number in numbers if self.watcher.late_left[self.name, number] > 0]
        for number in late:
            self.watcher.late_left[self.name, number] -= 1
        # What is late does not let itself be cancelled, in every other Op.
        with trio.CancelScope(shield=bool(late) and self.name in "bdf"):
            await trio.sleep(2 * LIMIT if late else self.plan.seconds[1])
        kinds = {self.fault(number) for number in numbers}
        if "process" in kinds:
            raise RuntimeError("as planned")
        if "code" in kinds and self.plan.batch_size == 1:
            return {}, 9000, "as planned"
        return {"id": feed_batch[0]["id"].copy()}, 0, ""


def _around(name: str, texts: Sequence[str]) -> str:
    return f"{name}({','.join(texts)})"


def graph_of(plan: Plan, watcher: Watcher) -> OpGraph:
    ops: dict[str, Op] = {EXECUTOR_NAME: RequestOp()}
    for one in plan.ops:
        make = _ProcessingOp if one.has_process else _ModelOp
        ops[one.name] = make(one, watcher, [ops[name] for name in one.inputs])
    return build(ResponseOp(input_ops=ops[plan.ops[-1].name]))


def outcomes(plan: Plan, number: int) -> set[Outcome]:
    """Evaluate the Ops one after the other: every answer that a request may get which does not leave.

    There is one, unless Ops fail side by side, joins take what comes first, or a neighbour in a batch is late.
    """
    return _Evaluation(plan, number).outcomes()


class _Evaluation:
    """What one request may come to: the texts that an Op may give it, and the codes with which it may end there."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._texts: dict[str, set[str]] = {EXECUTOR_NAME: {str(number)}}
        self._late = {op.name for op in plan.ops if self._is_late(op)}

    def outcomes(self) -> set[Outcome]:
        found: set[Outcome] = set()
        for op in self._needed():
            reached = [self._texts[name] for name in op.inputs]
            is_reached = any(reached) if self._plan.takes_first else all(reached)
            self._texts[op.name] = self._texts_of(op) if is_reached else set()
            if is_reached:
                found |= {(code, "") for code in self._codes(op)}
        return found | {(0, text) for text in self._texts[self._plan.ops[-1].name]}

    def _needed(self) -> list[OpPlan]:
        needed = {self._plan.ops[-1].name}
        for op in reversed(self._plan.ops):
            if op.name in needed:
                needed |= set(op.inputs)
        return [op for op in self._plan.ops if op.name in needed]

    def _is_late(self, op: OpPlan) -> bool:
        return self._plan.late(op, self._number) >= op.retry or self._has_late_neighbour(op)

    def _has_late_neighbour(self, op: OpPlan) -> bool:
        others = (number for number in range(len(self._plan.requests)) if number != self._number)
        return op.batch_size > 1 and any(self._plan.late(op, number) >= op.retry for number in others)

    def _is_always_late(self, op: OpPlan) -> bool:
        return self._plan.late(op, self._number) >= op.retry * self._plan.retry

    def _codes(self, op: OpPlan) -> set[int]:
        codes = {self._plan.hard(op, self._number)} - {0}
        alone = self._late == {op.name} and not self._has_late_neighbour(op)
        if op.name in self._late and (self._is_always_late(op) or not alone):
            codes.add(6000)
        return codes

    def _texts_of(self, op: OpPlan) -> set[str]:
        if self._plan.hard(op, self._number) or self._is_always_late(op):
            return set()
        if self._plan.takes_first and len(op.inputs) > 1:
            return {_around(op.name, [text]) for name in op.inputs for text in self._texts[name]}
        return {_around(op.name, texts) for texts in product(*(self._texts[name] for name in op.inputs))}
