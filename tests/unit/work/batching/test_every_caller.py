"""Any mix of sizes, keys, failures, cancellations and deadlines: each caller gets its own outcome, once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ovmstrio.core.errors import DeadlineExceeded, Overloaded
from ovmstrio.work.batching import Batcher, BatchOptions, open_batcher
from tests.support.examples import examples

Kind = Literal["good", "bad", "poison"]


@dataclass(frozen=True)
class Caller:
    number: int
    comes: float
    key: int
    size: int
    kind: Kind
    leaves: float = math.inf
    deadline: float = math.inf


@dataclass
class World:
    callers: list[Caller]
    options: BatchOptions
    run_seconds: float
    retry_singly: bool
    batches: list[list[Caller]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    outcomes: dict[int, object] = field(default_factory=dict)

    async def run(self, items: Sequence[Caller]) -> Sequence[int | Exception]:
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

    async def call(self, batcher: Batcher[Caller, int], caller: Caller) -> None:
        await trio.sleep_until(caller.comes)
        with trio.move_on_at(caller.leaves) as scope:
            try:
                outcome: object = await batcher.submit(
                    caller, key=caller.key, size=caller.size, deadline=caller.deadline
                )
            except (RuntimeError, ValueError, DeadlineExceeded, Overloaded) as error:
                outcome = error
            assert caller.number not in self.outcomes
            self.outcomes[caller.number] = outcome
        if scope.cancelled_caught:
            self.outcomes[caller.number] = "left"

    async def live(self, concurrency: int) -> None:
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

    def _check_outcome(self, caller: Caller, outcome: object) -> None:
        if outcome == "left":
            assert caller.leaves < math.inf
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


KINDS: list[Kind] = ["good", "good", "good", "good", "good", "good", "bad", "poison"]
TIMES = st.integers(0, 12).map(lambda quarter: quarter / 4)
ENDS = st.one_of(st.just(math.inf), st.just(math.inf), st.integers(0, 20).map(lambda eighth: eighth / 4 + 0.125))


@st.composite
def crowds(draw: st.DrawFn) -> list[Caller]:
    """Draw up to twenty callers."""
    count = draw(st.integers(1, 20))
    kinds = st.sampled_from(KINDS)
    return [
        Caller(n, draw(TIMES), draw(st.integers(0, 2)), draw(st.integers(1, 6)), draw(kinds), draw(ENDS), draw(ENDS))
        for n in range(count)
    ]


@settings(max_examples=examples(150))
@given(
    callers=crowds(),
    max_size=st.integers(1, 6),
    timeout=st.sampled_from([0.0, 0.5, 2.0]),
    run_seconds=st.sampled_from([0.0, 0.4, 1.0]),
    concurrency=st.integers(1, 3),
    flags=st.tuples(st.booleans(), st.booleans()),
    max_waiting=st.sampled_from([2, 100]),
)
def test_every_caller_gets_its_own_outcome_once(
    callers: list[Caller],
    max_size: int,
    timeout: float,
    run_seconds: float,
    concurrency: int,
    flags: tuple[bool, bool],
    max_waiting: int,
) -> None:
    """Whatever happens around it, nobody hangs, gets another one's result, or is answered twice."""
    options = BatchOptions(max_size, timeout, max_waiting, eager=flags[0])
    world = World(callers, options, run_seconds, retry_singly=flags[1])

    async def bounded() -> None:
        with trio.fail_after(1000):
            await world.live(concurrency)

    trio.run(bounded, clock=MockClock(autojump_threshold=0))
    world.check()
