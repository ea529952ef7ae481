from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trio.testing import MockClock

from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, NotReady, Overloaded
from ovmstrio.core.hooks import BatchHooks
from ovmstrio.serving.batching import Batcher, BatchOptions, BatchPolicy, open_batcher
from tests.support.examples import examples

Options = BatchOptions


class _Runner:
    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[tuple[float, list[int]]] = []
        self.seconds = seconds
        self.cancelled = 0

    async def __call__(self, items: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append((trio.current_time(), list(items)))
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if 13 in items:
            raise RuntimeError("thirteen")
        return [ValueError(f"negative: {item}") if item < 0 else 2 * item for item in items]

    @property
    def items(self) -> list[list[int]]:
        return [batch for _, batch in self.batches]


async def _submit_all(
    batcher: Batcher[int, int], items: Sequence[int], got: dict[int, Any] | None = None, **how: Any
) -> dict[int, Any]:
    """Submit items in order, and return the result or the text of the error of each."""
    outcomes: dict[int, Any] = {} if got is None else got

    async def call(item: int, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            outcomes[item] = await batcher.submit(item, **how)
        except Exception as error:  # noqa: BLE001 - an outcome of the caller
            outcomes[item] = f"{type(error).__name__}: {error}"

    async with trio.open_nursery() as nursery:
        for item in items:
            await nursery.start(call, item)
    return outcomes


async def test_full_batch_runs_at_once_and_part_of_a_batch_after_the_timeout(autojump_clock: MockClock) -> None:
    run = _Runner()
    async with open_batcher(run, Options(3, 2.0)) as batcher:
        begin = trio.current_time()
        assert await _submit_all(batcher, [1, 2, 3, 4, 5]) == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
        assert [(when - begin, items) for when, items in run.batches] == [(0, [1, 2, 3]), (2, [4, 5])]
        begin = trio.current_time()
        assert await batcher.submit(7) == 14
        assert trio.current_time() - begin == 2


async def test_concurrency_limits_running_batches(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=5)
    async with open_batcher(run, Options(2, 0.0), concurrency=2) as batcher:
        assert await _submit_all(batcher, range(8)) == {item: 2 * item for item in range(8)}
        assert (batcher.running, batcher.waiting) == (0, 0)
    assert sorted(run.items) == [[0], [1], [2, 3], [4, 5], [6, 7]]
    assert [when - run.batches[0][0] for when, _ in run.batches] == [0, 0, 5, 5, 10]


async def test_queued_items_run_by_priority_and_then_in_order_of_arrival(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=1)
    async with open_batcher(run, Options(2, 60.0)) as batcher, trio.open_nursery() as nursery:
        for item, priority in enumerate((0, 0, 0, 2, 1, 2, 0, 1)):
            nursery.start_soon(partial(batcher.submit, item, priority=priority))
            await trio.testing.wait_all_tasks_blocked()
    assert run.items == [[0, 1], [4, 7], [3, 5], [2, 6]]


async def test_a_full_group_with_a_higher_priority_runs_first(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=1)
    async with open_batcher(run, Options(1, 60.0)) as batcher, trio.open_nursery() as nursery:
        for item, priority in enumerate((0, 3, 0, 1)):
            nursery.start_soon(partial(batcher.submit, item, key=item, priority=priority))
            await trio.testing.wait_all_tasks_blocked()
    assert run.items == [[0], [3], [1], [2]]


async def test_failed_batch_fails_its_callers_or_is_retried_one_by_one(autojump_clock: MockClock) -> None:
    async with open_batcher(_Runner(), Options(3, 1.0)) as batcher:
        failed = dict.fromkeys([1, 13, 2], "RuntimeError: thirteen")
        assert await _submit_all(batcher, [1, 13, 2, 4]) == {**failed, 4: 8}
    run = _Runner()
    async with open_batcher(run, Options(3, 1.0), retry_singly=True) as batcher:
        assert await _submit_all(batcher, [1, 13, 2]) == {1: 2, 13: "RuntimeError: thirteen", 2: 4}
        assert await _submit_all(batcher, [13]) == {13: "RuntimeError: thirteen"}
    assert run.items == [[1, 13, 2], [1], [13], [2], [13]]


async def test_shared_error_has_the_same_traceback_length_for_each_caller(autojump_clock: MockClock) -> None:
    lengths: list[int] = []

    async def call(batcher: Batcher[int, int]) -> None:
        try:
            await batcher.submit(13)
        except RuntimeError as error:
            lengths.append(len(traceback.extract_tb(error.__traceback__)))

    async with open_batcher(_Runner(), Options(4, 1.0)) as batcher, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(call, batcher)
    assert len(lengths) == 4
    assert len(set(lengths)) == 1


@pytest.mark.parametrize(
    ("answer", "found"),
    [([1], "a list of 1"), ([1, 2, 3], "a list of 3"), (None, "NoneType"), ("ab", "str"), ({1: 2}, "dict")],
)
async def test_wrong_number_of_results_fails_all_callers(answer: Any, found: str, autojump_clock: MockClock) -> None:
    async def run(items: Sequence[int]) -> Any:
        return answer

    async with open_batcher(run, Options(2, 1.0), retry_singly=True) as batcher:
        text = f"batch function returned a wrong result: expected a list of 2, got {found}"
        assert await _submit_all(batcher, [1, 2]) == dict.fromkeys([1, 2], f"ModelFailure: {text}")
        assert ModelFailure(text).message == text


async def test_cancelled_caller_leaves_the_queue(autojump_clock: MockClock) -> None:
    run = _Runner()
    async with open_batcher(run, Options(3, 10.0)) as batcher:
        with trio.move_on_after(1) as scope:
            await batcher.submit(1)
        assert scope.cancelled_caught
        assert batcher.waiting == 0
        assert await _submit_all(batcher, [2, 3, 4]) == {2: 4, 3: 6, 4: 8}
    assert run.items == [[2, 3, 4]]


async def test_cancelled_caller_leaves_its_running_batch_to_the_others(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=5)
    async with open_batcher(run, Options(2, 1.0)) as batcher, trio.open_nursery() as nursery:
        nursery.start_soon(_submit_all, batcher, [1])
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(2) as scope:
            await batcher.submit(2)
        assert scope.cancelled_caught
        assert trio.current_time() - run.batches[0][0] == 2
    assert (run.items, run.cancelled) == ([[1, 2]], 0)


async def test_batch_without_callers_is_cancelled_before_its_last_caller_returns(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=5)
    ended: list[bool] = []

    async def slow_to_stop(items: Sequence[int]) -> Sequence[int | Exception]:
        try:
            return await run(items)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            ended.append(True)

    async with open_batcher(slow_to_stop, Options(2, 1.0)) as batcher:
        begin = trio.current_time()
        with trio.move_on_after(2):
            await _submit_all(batcher, [1, 2])
        assert (trio.current_time() - begin, ended, run.cancelled) == (3, [True], 1)
        assert await _submit_all(batcher, [3, 4]) == {3: 6, 4: 8}


@pytest.mark.parametrize(
    ("seconds_until_deadline", "ran", "ended"),
    [
        pytest.param({13: math.inf, 1: 12, 2: math.inf}, [1, 2], {13: 10, 1: 12, 2: 17}, id="while it runs again"),
        pytest.param({13: math.inf, 1: 12, 2: 7}, [1], {13: 10, 1: 12, 2: 7}, id="before it runs again"),
    ],
)
async def test_retry_ends_with_the_deadline_of_its_caller(
    autojump_clock: MockClock, seconds_until_deadline: dict[int, float], ran: list[int], ended: dict[int, float]
) -> None:
    run = _Runner(seconds=5)
    ends: dict[int, float] = {}
    async with open_batcher(run, Options(3, 1.0), retry_singly=True) as batcher:
        begin = trio.current_time()

        async def call(item: int, deadline: float) -> None:
            await _submit_all(batcher, [item], deadline=deadline)
            ends[item] = trio.current_time() - begin

        async with trio.open_nursery() as nursery:
            for item, seconds in seconds_until_deadline.items():
                nursery.start_soon(call, item, begin + seconds)
                await trio.testing.wait_all_tasks_blocked()
        assert (batcher.running, batcher.waiting) == (0, 0)
    assert run.items == [[13, 1, 2], [13], *([item] for item in ran)]
    assert run.cancelled == 1
    assert ends == ended


async def test_deadline_may_pass_before_submit_in_the_queue_or_in_the_batch(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=5)
    async with open_batcher(run, Options(2, 10.0)) as batcher:
        begin = trio.current_time()
        for deadline in (begin + 3, begin):
            with pytest.raises(DeadlineExceeded):
                await batcher.submit(1, deadline=deadline)
        async with trio.open_nursery() as nursery:
            got: dict[int, Any] = {}
            for item, deadline in ((2, math.inf), (3, trio.current_time() + 1)):
                nursery.start_soon(partial(_submit_all, batcher, [item], got, deadline=deadline))
        assert got[2] == 4
        assert got[3].startswith("DeadlineExceeded: the deadline passed before")
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(4, deadline=trio.current_time() + 11)
    assert run.cancelled == 1


async def test_close_runs_waiting_items_without_delay(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=1)
    got: dict[int, Any] = {}
    async with trio.open_nursery() as nursery:
        begin = trio.current_time()
        async with open_batcher(run, Options(2, math.inf)) as batcher:
            nursery.start_soon(_submit_all, batcher, [1, 2, 3], got)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.ClosedResourceError):
            await batcher.submit(4)
        await batcher.aclose()
        assert trio.current_time() - begin == 2
    assert got == {1: 2, 2: 4, 3: 6}


async def test_close_before_serve_fails_waiting_callers() -> None:
    made: Batcher[int, int] = Batcher(_Runner(), Options(1, 0.0))
    async with trio.open_nursery() as nursery:
        got: dict[int, Any] = {}
        nursery.start_soon(_submit_all, made, [1], got)
        await trio.testing.wait_all_tasks_blocked()
        await made.aclose()
    assert got[1].startswith("NotReady")
    await made.serve()
    with pytest.raises(trio.ClosedResourceError):
        await made.submit(1)


@pytest.mark.parametrize("ticks", range(5))
async def test_submit_while_the_batcher_is_cancelled_raises(ticks: int) -> None:
    batcher: Batcher[int, int] = Batcher(_Runner(), Options(1, 0.0))
    scope = trio.CancelScope()

    async def host(*, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await batcher.serve(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(host)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        with pytest.raises((NotReady, trio.ClosedResourceError)):
            await batcher.submit(1)


async def test_item_of_a_cancelled_caller_does_not_run_later() -> None:
    cancelled: set[int] = set()
    ran: list[list[int]] = []

    async def run(items: Sequence[int]) -> Sequence[int | Exception]:
        assert not cancelled.intersection(items)
        ran.append(list(items))
        return list(items)

    async with open_batcher(run, Options(2, 1000.0)) as batcher:

        async def leave(item: int, scope: trio.CancelScope) -> None:
            with scope:
                try:
                    await batcher.submit(item)
                finally:
                    cancelled.add(item)

        for item in range(0, 400, 2):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave, item, scope)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(batcher.submit, item + 1)
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                if batcher.waiting:
                    nursery.start_soon(batcher.submit, -1)
    assert {item for batch in ran for item in batch} >= set(range(1, 400, 2))


async def test_error_of_the_block_cancels_batches_and_fails_callers(autojump_clock: MockClock) -> None:
    run = _Runner(seconds=5)
    got: dict[int, Any] = {}
    async with trio.open_nursery() as nursery:
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the block is tested
            async with open_batcher(run, Options(1, 0.0)) as batcher:
                nursery.start_soon(_submit_all, batcher, [1, 2], got)
                await trio.testing.wait_all_tasks_blocked()
                raise ValueError("of the block")
        assert caught.group_contains(ValueError, match="of the block")
    assert [text.partition(":")[0] for text in got.values()] == [NotReady.__name__] * 2
    assert (run.items, run.cancelled) == ([[1]], 1)


async def test_hooks_get_batch_sizes_and_queue_times(autojump_clock: MockClock) -> None:
    sizes: list[int] = []
    waits: list[float] = []

    class Hooks(BatchHooks):
        def batch_size(self, size: int) -> None:
            sizes.append(size)

        def queue_time(self, seconds: float) -> None:
            waits.append(seconds)

    async with open_batcher(_Runner(), Options(6, 2.0), hooks=Hooks()) as batcher:
        await _submit_all(batcher, [1, 2, 3], size=3)
    assert (sizes, waits) == ([6, 3], [0, 0, 2])


def test_concurrency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency must be 1 or more, got 0"):
        Batcher(_Runner(), Options(1, 0.0), concurrency=0)


# Random callers


Kind = Literal["good", "bad", "poison"]


@dataclass(frozen=True)
class _Caller:
    number: int
    arrives: float
    key: int
    size: int
    kind: Kind
    cancelled: float = math.inf
    deadline: float = math.inf


@dataclass
class _World:
    """Callers of a batcher, the batches that ran, and the outcome of each caller."""

    callers: list[_Caller]
    options: BatchOptions
    run_seconds: float
    retry_singly: bool
    batches: list[list[_Caller]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    outcomes: dict[int, object] = field(default_factory=dict)

    async def run(self, items: Sequence[_Caller]) -> Sequence[int | Exception]:
        self.batches.append(list(items))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await trio.sleep(self.run_seconds)
        finally:
            self.running -= 1
        if any(item.kind == "poison" for item in items):
            raise RuntimeError("poisoned")
        return [ValueError(item.number) if item.kind == "bad" else 7 * item.number for item in items]

    async def call(self, batcher: Batcher[_Caller, int], caller: _Caller) -> None:
        await trio.sleep_until(caller.arrives)
        with trio.move_on_at(caller.cancelled) as scope:
            try:
                outcome: object = await batcher.submit(
                    caller, key=caller.key, size=caller.size, deadline=caller.deadline
                )
            except (RuntimeError, ValueError, DeadlineExceeded, Overloaded) as error:
                outcome = error
            assert caller.number not in self.outcomes
            self.outcomes[caller.number] = outcome
        if scope.cancelled_caught:
            self.outcomes[caller.number] = "cancelled"

    async def run_all(self, concurrency: int) -> None:
        opened = open_batcher(self.run, self.options, concurrency=concurrency, retry_singly=self.retry_singly)
        async with opened as batcher:
            async with trio.open_nursery() as nursery:
                for caller in self.callers:
                    nursery.start_soon(self.call, batcher, caller)
            assert (batcher.waiting, self.running) == (0, 0)
            assert self.most_running <= concurrency

    def check(self) -> None:
        assert len(self.outcomes) == len(self.callers)
        for caller in self.callers:
            self._check_outcome(caller, self.outcomes[caller.number])
        for batch in self.batches:
            assert len({caller.key for caller in batch}) == 1
            assert len(batch) == 1 or sum(caller.size for caller in batch) <= self.options.max_size
        ran = Counter(caller.number for batch in self.batches for caller in batch)
        assert max(ran.values(), default=1) <= (2 if self.retry_singly else 1)

    def _check_outcome(self, caller: _Caller, outcome: object) -> None:
        if outcome == "cancelled":
            assert caller.cancelled < math.inf
        elif isinstance(outcome, DeadlineExceeded):
            assert caller.deadline < math.inf
        elif isinstance(outcome, Overloaded):
            assert not any(caller in batch for batch in self.batches)
        elif isinstance(outcome, RuntimeError):
            last = [batch for batch in self.batches if caller in batch][-1]
            assert any(each.kind == "poison" for each in last)
            assert caller.kind == "poison" or not self.retry_singly
        elif isinstance(outcome, ValueError):
            assert caller.kind == "bad"
            assert outcome.args == (caller.number,)
        else:
            assert caller.kind == "good"
            assert outcome == 7 * caller.number


_KINDS: list[Kind] = ["good", "good", "good", "good", "good", "good", "bad", "poison"]
_TIMES = st.integers(0, 12).map(lambda quarter: quarter / 4)
_ENDS = st.one_of(st.just(math.inf), st.just(math.inf), st.integers(0, 20).map(lambda eighth: eighth / 4 + 0.125))


@st.composite
def _callers(draw: st.DrawFn) -> list[_Caller]:
    count = draw(st.integers(1, 20))
    kinds, sizes = st.sampled_from(_KINDS), st.integers(1, 6)
    return [
        _Caller(n, draw(_TIMES), draw(st.integers(0, 2)), draw(sizes), draw(kinds), draw(_ENDS), draw(_ENDS))
        for n in range(count)
    ]


@settings(max_examples=examples(150))
@given(
    callers=_callers(),
    max_size=st.integers(1, 6),
    timeout=st.sampled_from([0.0, 0.5, 2.0]),
    run_seconds=st.sampled_from([0.0, 0.4, 1.0]),
    concurrency=st.integers(1, 3),
    flags=st.tuples(st.booleans(), st.booleans()),
    max_waiting=st.sampled_from([2, 100]),
)
def test_every_caller_gets_its_own_outcome_once(
    callers: list[_Caller],
    max_size: int,
    timeout: float,
    run_seconds: float,
    concurrency: int,
    flags: tuple[bool, bool],
    max_waiting: int,
) -> None:
    options = BatchOptions(max_size, timeout, max_waiting, eager=flags[0])
    world = _World(callers, options, run_seconds, retry_singly=flags[1])

    async def bounded() -> None:
        with trio.fail_after(1000):
            await world.run_all(concurrency)

    trio.run(bounded, clock=MockClock(autojump_threshold=0))
    world.check()


# Policy


def _policy(max_size: int = 4, timeout: float = 1.0, **options: Any) -> BatchPolicy[str]:
    return BatchPolicy(BatchOptions(max_size, timeout, **options))


def _arrive(made: BatchPolicy[str], items: str, now: float = 0.0, *, key: Hashable = "", size: int = 1) -> None:
    for item in items:
        made.arrive(item, key, size, now)


def test_eager_batch_leaves_while_no_batch_runs() -> None:
    made = _policy(4, eager=True)
    _arrive(made, "ab")
    assert made.take(0.0) == []
    assert (made.next_time(), made.next_time(idle=True)) == (1.0, -math.inf)
    assert made.take(0.0, idle=True) == ["a", "b"]


def test_full_queue_is_refused_until_an_item_leaves() -> None:
    made = _policy(9, max_waiting=2)
    _arrive(made, "ab")
    with pytest.raises(Overloaded, match="queue for batches is full: 2 requests wait"):
        _arrive(made, "c")
    made.leave("a")
    _arrive(made, "c")
    assert made.take(math.inf) == ["b", "c"]


@pytest.mark.parametrize(("size", "timeout", "waiting"), [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, math.nan, 1)])
def test_invalid_batch_options_are_refused(size: int, timeout: float, waiting: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        BatchOptions(size, timeout, waiting)


def test_item_arrives_once_and_has_a_size() -> None:
    made = _policy()
    _arrive(made, "a")
    with pytest.raises(ValueError, match="arrives once"):
        _arrive(made, "a")
    with pytest.raises(ValueError, match="size of 1 or more"):
        made.arrive("b", "", 0, 0.0)


def test_clear_returns_items_in_order_of_arrival() -> None:
    made = _policy(2)
    _arrive(made, "a", key=1)
    _arrive(made, "bc", key=2)
    assert made.clear() == ["a", "b", "c"]
    assert (len(made), made.take(math.inf)) == (0, [])


@dataclass
class _Waiting:
    number: int
    key: int
    size: int
    arrived: float


class _PolicyMachine(RuleBasedStateMachine):
    @initialize(
        max_size=st.integers(1, 6), timeout=st.sampled_from([0.0, 1.0, 2.5, math.inf]), waiting=st.integers(1, 12)
    )
    def start(self, max_size: int, timeout: float, waiting: int) -> None:
        self.options = BatchOptions(max_size, timeout, waiting)
        self.made: BatchPolicy[int] = BatchPolicy(self.options)
        self.waiting: list[_Waiting] = []
        self.now = 0.0
        self.count = 0

    @rule(key=st.integers(0, 2), size=st.integers(1, 8))
    def item_arrives(self, key: int, size: int) -> None:
        self.count += 1
        if len(self.waiting) == self.options.max_waiting:
            with pytest.raises(Overloaded):
                self.made.arrive(self.count, key, size, self.now)
            return
        self.made.arrive(self.count, key, size, self.now)
        self.waiting.append(_Waiting(self.count, key, size, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def item_leaves(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        self.made.leave(item.number)
        self.waiting.remove(item)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def _fronts(self) -> list[list[_Waiting]]:
        fronts = []
        for key in dict.fromkeys(item.key for item in self.waiting):
            group = [item for item in self.waiting if item.key == key]
            count = 1
            while count < len(group) and sum(item.size for item in group[: count + 1]) <= self.options.max_size:
                count += 1
            is_full = sum(item.size for item in group) >= self.options.max_size
            if is_full or group[0].arrived + self.options.timeout_seconds <= self.now:
                fronts.append(group[:count])
        return fronts

    @rule()
    def take(self) -> None:
        fronts = self._fronts()
        taken = self.made.take(self.now)
        assert taken == ([item.number for item in fronts[0]] if fronts else [])
        self.waiting = [item for item in self.waiting if item.number not in taken]

    @invariant()
    def next_time_is_that_of_the_first_batch(self) -> None:
        if not hasattr(self, "made"):
            return
        assert len(self.made) == len(self.waiting)
        when = self.made.next_time()
        assert (when <= self.now) == bool(self._fronts())
        if when > self.now:
            first = min((item.arrived for item in self.waiting), default=math.inf)
            assert when == first + self.options.timeout_seconds


TestPolicyMachine = _PolicyMachine.TestCase
