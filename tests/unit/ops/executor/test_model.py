from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.op import EXECUTOR_NAME
from tests.support.examples import examples
from tests.support.ops import asking
from tests.support.ops_model import EPSILON, LIMIT, Fault, OpPlan, Plan, RequestPlan, Watcher, graph_of, outcomes

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
    """Draw a pipeline, its requests, and what happens to them."""
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
    """A plan, lived through; ``ends`` has what each request ended with, and how long it took."""

    plan: Plan
    ends: list[list[tuple[str, int, str, float, float]]] = field(default_factory=list)
    begin: float = 0.0

    async def live(self, watcher: Watcher) -> None:
        """Ask everything, and close the pipeline when it is to be closed."""
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
        """Compare what came with what may come."""
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
    assert not any(runner._begun for runner in runners)
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
