from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, Literal

import numpy as np
import psutil
import pytest
import structlog
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.ext.ops import Op, PipelineRequest, RequestOp, ResponseOp
from ovmstrio.ops.executor import Executor, open_executor
from ovmstrio.ops.executor.channel import Channel, Sample, Ticket
from ovmstrio.ops.graph import OpGraph, build
from ovmstrio.ops.messages import from_array
from ovmstrio.ops.observing.hooks import UNKNOWN_CALLER, Caller, ChannelState, OpHooks, Span, Stage
from ovmstrio.ops.op import EXECUTOR_NAME
from ovmstrio.ops.settings import DagSettings, OpSettings, PipelineSettings
from tests.support.examples import examples
from tests.support.ops import asking, text_graph
from tests.support.ops import settings as op_settings
from tests.support.waits import WAIT_SECONDS, until_async

LIMIT: Final = 0.1
"""Timeout of an attempt of ``process``, where there is one."""

EPSILON: Final = 1e-6
PRODUCT_CODE: Final = 777
HARD: Final = {"raise": 10000, "product": PRODUCT_CODE, "process": 10000, "code": 9000}

Outcome = tuple[int, str]


@dataclass(frozen=True)
class Fault:
    """Behaviour of an Op for a request; ``times`` is the number of late attempts of ``process``."""

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
        pass

    def request_started(
        self, data_id: int, log_id: int, *, profile: bool = False, caller: Caller = UNKNOWN_CALLER
    ) -> None:
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


GRACE = 0.05
SECONDS = st.sampled_from([0.0, 0.0, 0.01, 0.03, 0.05])
TIMES = st.none() | st.sampled_from([0.0, 0.01, 0.07, 0.15, 0.4])
FAULTS = st.builds(Fault, st.sampled_from(["raise", "product", "process", "code", "skip"])) | st.builds(
    Fault, st.just("late"), st.integers(1, 5)
)


@st.composite
def op_plans(draw: st.DrawFn) -> list[OpPlan]:
    """Draw Ops, each of which has some of those before it as inputs."""
    plans: list[OpPlan] = []
    for name in "abcdef"[: draw(st.integers(1, 6))]:
        before = [EXECUTOR_NAME, *(plan.name for plan in plans)]
        # What came last is an input more often than not, so that most Ops lead to the last one.
        inputs = draw(st.lists(st.sampled_from([*before, before[-1]]), min_size=1, max_size=3, unique=True))
        plans.append(
            OpPlan(
                name,
                tuple(inputs),
                draw(st.integers(1, 3)),
                draw(st.sampled_from([1, 2, 4])),
                draw(st.sampled_from([20, 20, -1])),
                draw(st.sampled_from([-1, 100])),
                draw(st.integers(1, 3)),
                (draw(SECONDS), draw(SECONDS), draw(SECONDS)),
                draw(st.sampled_from([True, True, False])),
            )
        )
    return plans


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ops = draw(op_plans())
    names = st.sampled_from([op.name for op in ops])
    requests = st.builds(
        RequestPlan, SECONDS, st.integers(1, 3), TIMES, TIMES, st.dictionaries(names, FAULTS, max_size=2)
    )
    drawn = draw(st.lists(requests, min_size=1, max_size=8))
    if any(op.waits_for_others for op in ops):
        drawn = [replace(one, deadline=0.6 if one.deadline is None else one.deadline) for one in drawn]
    return Plan(
        ops, drawn, draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 2])), draw(st.booleans()),
        draw(st.integers(1, 2)), draw(st.none() | st.sampled_from([0.0, 0.05, 0.2])),
    )  # fmt: skip


@dataclass
class _PlanRun:
    """Run of a plan; ``ends`` has the outcome and the duration of each request."""

    plan: Plan
    ends: list[list[tuple[str, int, str, float, float]]] = field(default_factory=list)
    begin: float = 0.0

    async def live(self, watcher: Watcher) -> None:
        self.ends = [[] for _ in self.plan.requests]
        self.begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            async with open_executor(
                graph_of(self.plan, watcher), self.plan.settings, hooks=watcher, grace_seconds=GRACE
            ) as executor:
                asking_all = trio.Event()
                nursery.start_soon(self._ask_all, executor, asking_all)
                with trio.move_on_after(math.inf if self.plan.closes is None else self.plan.closes):
                    await asking_all.wait()
                    # Hooks that do not let themselves be cancelled go on without their requests.
                    await trio.sleep(2 * LIMIT)
                    await wait_all_tasks_blocked()
                    check_empty(executor, self.plan)
                closing = trio.current_time()
            assert trio.current_time() - closing <= GRACE + 2 * LIMIT + EPSILON

    async def _ask_all(self, executor: Executor, ended: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(len(self.plan.requests)):
                nursery.start_soon(self._ask, executor, number)
        ended.set()

    async def _ask(self, executor: Executor, number: int) -> None:
        plan = self.plan.requests[number]
        await trio.sleep(plan.at)
        begin = trio.current_time()
        deadline = math.inf if plan.deadline is None else begin + plan.deadline
        with trio.move_on_after(math.inf if plan.leaves is None else plan.leaves):
            response = await executor.infer(asking(str(number), logid=number), deadline)
            text = response.values[0] if not response.err_no else ""
            self._end(number, "answered", (response.err_no, text), begin)
            return
        self._end(number, "left", (0, ""), begin)

    def _end(self, number: int, how: str, outcome: tuple[int, str], begin: float) -> None:
        now = trio.current_time()
        self.ends[number].append((how, *outcome, now - begin, now - self.begin))

    def check(self) -> None:
        for number, ends in enumerate(self.ends):
            ((how, code, text, took, at),) = ends
            plan = self.plan.requests[number]
            if how == "left":
                assert plan.leaves is not None
                assert abs(took - plan.leaves) <= EPSILON
                continue
            assert took <= min(plan.deadline or math.inf, plan.leaves or math.inf) + EPSILON or took <= EPSILON
            expected = outcomes(self.plan, number)
            if plan.deadline is not None and took >= plan.deadline - EPSILON:
                expected |= {(6000, "")}
            if self.plan.closes is not None and at >= self.plan.closes - EPSILON:
                expected |= {(3001, "")}
            assert (code, text) in expected, (number, expected)


def check_empty(executor: Executor, plan: Plan) -> None:
    """Check that nothing of any request is left, now that all of them have ended."""
    runners: Any = executor._runners.values()
    assert executor.in_flight == 0
    assert [channel.size for channel in executor.channels()] == [0] * (len(runners) + 1)
    assert executor._admission.waiting == 0
    assert executor._admission._free == plan.worker_num
    assert (executor._stall_detector._moving, executor._stall_detector._room) == (0, plan.worker_num)
    assert all(len(runner._pool._free) == runner._pool._count for runner in runners)
    assert not any(runner._batched for runner in runners)
    batchers = [runner._batcher for runner in runners if runner._batcher is not None]
    assert [(batcher.waiting, batcher.running) for batcher in batchers] == [(0, 0)] * len(batchers)


@settings(max_examples=examples(150))
@given(plans())
def test_every_request_ends_once_as_predicted(plan: Plan) -> None:
    watcher = Watcher(plan)
    life = _PlanRun(plan)

    async def bounded() -> None:
        with trio.fail_after(plan.bound + 1):
            await life.live(watcher)

    trio.run(bounded, clock=MockClock(autojump_threshold=0))
    life.check()
    assert watcher.wrongs == []
    assert watcher.started == watcher.finished
    assert set(watcher.finished.values()) <= {1}


# Channels


async def enter_all(channel: Channel, *data_ids: int) -> list[Ticket]:
    with trio.fail_after(WAIT_SECONDS):
        return [await channel.enter(data_id) for data_id in data_ids]


async def test_a_full_channel_blocks_all_but_forced_samples(autojump_clock: MockClock) -> None:
    channel = Channel(1, 1)
    first, second = await enter_all(channel, 1, 2)
    with trio.move_on_after(1) as scope:
        await channel.enter(3)
    assert scope.cancelled_caught
    forced = await channel.enter(0, is_forced=True)
    assert channel.size == 2
    first.leave()
    await forced.wait_for_slot()
    forced.leave()
    await second.wait_for_slot()
    (third,) = await enter_all(channel, 3)
    third.leave()
    third.leave()
    second.leave()
    assert channel.size == 0


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.none() | st.integers(1, 6)), max_size=12),
)
def test_every_sample_gets_a_seat_or_leaves(
    capacity: int, seats: int, samples: list[tuple[int, int, int | None]]
) -> None:
    async def live() -> None:
        channel, wait_for_slot, most = Channel(capacity, seats), 0, 0

        async def use(arrives: int, stays: int, gives_up_at: int | None, data_id: int) -> None:
            nonlocal wait_for_slot, most
            await trio.sleep(arrives)
            with trio.move_on_after(math.inf if gives_up_at is None else gives_up_at - 0.5):
                ticket = await channel.enter(data_id)
                try:
                    await ticket.wait_for_slot()
                    wait_for_slot += 1
                    most = max(most, wait_for_slot)
                    assert not capacity or channel.size <= capacity
                    try:
                        await trio.sleep(stays)
                    finally:
                        wait_for_slot -= 1
                finally:
                    ticket.leave()

        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                for data_id, sample in enumerate(samples):
                    nursery.start_soon(use, *sample, data_id)
        await wait_all_tasks_blocked()
        assert most <= seats
        assert channel.size == 0
        for ticket in await enter_all(channel, *range(seats)):
            await ticket.wait_for_slot()

    trio.run(live, clock=MockClock(autojump_threshold=0))


# A soak


REQUESTS: Final = 20_000
CLIENTS: Final = 40
LOOK_EVERY: Final = 500
NUMBERS: Final = 8192
MOST_GROWTH_BYTES: Final = 16e6


class _Adding(Op):
    """Op that adds its inputs in batches; an input that begins with 1 fails in ``b``, one with 2 is late in ``c``."""

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.lowlevel.checkpoint()
        arrays = [one["x"] for one in input_dicts.values()]
        if self.name == "b" and arrays[0].flat[0] == 1:
            raise RuntimeError("as planned")
        return {"x": np.sum(arrays, axis=0)}

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        if self.name == "c" and (feed_batch[0]["x"][:, 0] == 2).any():
            await trio.sleep(10)
        return dict(feed_batch[0])

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": str(fetch_data["x"].flat[0])} if self.name == "d" else fetch_data


class _Soak:
    def __init__(self, executor: Executor) -> None:
        self.ends: Counter[int | str] = Counter()
        self.resident: list[int] = []
        self._executor = executor

    async def client(self, seed: int) -> None:
        chance = random.Random(seed)
        while self.ends.total() < REQUESTS:
            kind = chance.choices((1, 2, 3), (5, 1, 94))[0]
            request = PipelineRequest(tensors=[from_array("x", np.full((1, NUMBERS), kind, np.float32))])
            with trio.move_on_after(chance.choice((0.001, 0.004)) if chance.random() < 0.1 else 60) as scope:
                response = await self._executor.infer(request)
                assert response.err_no or float(response.values[0]) in {kind, 2 * kind}
                self.ends[response.err_no] += 1
            self.ends["left"] += scope.cancelled_caught
            if self.ends.total() % LOOK_EVERY == 0:
                gc.collect()
                self.resident.append(psutil.Process().memory_info().rss)


def count_objects(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


@pytest.mark.slow
@pytest.mark.parametrize("takes_first", [False, True])
async def test_memory_reaches_a_plateau(takes_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("processing", "stages"):
        monkeypatch.setattr(f"ovmstrio.ops.executor.{module}.log", structlog.wrap_logger(None, processors=[_drop]))
    one = OpSettings(batch_size=4, auto_batching_timeout=2, timeout=20, concurrency=2)
    pipeline = op_settings(
        worker_num=24, channel_size=4, channel_recv_frist_arrive=takes_first, ops=dict.fromkeys("abcd", one)
    )
    async with open_executor(text_graph("a<@", "b<a", "c<a", "d<b c", make=_Adding), pipeline) as executor:
        soak = _Soak(executor)
        async with trio.open_nursery() as nursery:
            for seed in range(CLIENTS):
                nursery.start_soon(soak.client, seed)
        assert executor.in_flight == 0
        # Threads of requests whose callers left end later than the requests.
        await until_async(lambda: (count_objects(Sample), count_objects(Ticket)) == (0, 0))
    assert soak.ends.total() >= REQUESTS
    quarter = len(soak.resident) // 4
    assert max(soak.resident[-quarter:]) - max(soak.resident[quarter : 2 * quarter]) < MOST_GROWTH_BYTES
