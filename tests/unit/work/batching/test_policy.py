from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ovmstrio.core.errors import Overloaded
from ovmstrio.work.batching.policy import BatchOptions, BatchPolicy


def policy(max_size: int = 4, timeout: float = 1.0, **options: Any) -> BatchPolicy[str]:
    """Make a policy of items that are letters."""
    return BatchPolicy(BatchOptions(max_size, timeout, **options))


def arrive(made: BatchPolicy[str], items: str, now: float = 0.0, *, key: Hashable = "", size: int = 1) -> None:
    """Let each letter arrive."""
    for item in items:
        made.arrive(item, key, size, now)


def test_a_full_batch_leaves_at_once_and_the_rest_waits() -> None:
    """Of five items and room for three, three run in the order of arrival, and two wait for their time."""
    made = policy(3)
    arrive(made, "ab", 0.0)
    assert made.take(0.0) == []
    arrive(made, "cde", 0.5)
    assert made.next_time() == -math.inf
    assert made.take(0.5) == ["a", "b", "c"]
    assert made.take(0.5) == []
    assert made.next_time() == 1.5
    assert made.take(1.5) == ["d", "e"]
    assert (len(made), made.next_time()) == (0, math.inf)


def test_time_begins_with_the_first_item_and_later_ones_do_not_extend_it() -> None:
    """Items that drip in do not hold the first one up."""
    made = policy(10)
    arrive(made, "a", 1.0)
    arrive(made, "b", 1.9)
    assert made.take(1.99) == []
    assert made.take(2.0) == ["a", "b"]


def test_a_group_whose_first_item_left_waits_for_the_next_one() -> None:
    """An item that leaves takes its time with it, and its place is free for others."""
    made = policy(3, max_waiting=3)
    arrive(made, "a", 0.0)
    arrive(made, "bc", 0.5)
    made.leave("a")
    assert made.take(1.0) == []
    assert made.next_time() == 1.5
    arrive(made, "d", 1.0)
    assert made.take(1.0) == ["b", "c", "d"]
    with pytest.raises(KeyError):
        made.leave("a")


def test_items_of_different_keys_never_meet() -> None:
    """Each key has its own batches, and the one whose first item came first goes first."""
    made = policy(2)
    arrive(made, "a", 0.0, key=1)
    arrive(made, "bc", 0.1, key=2)
    arrive(made, "de", 0.2, key=3)
    assert made.take(0.2) == ["b", "c"]
    assert made.take(0.2) == ["d", "e"]
    assert made.take(0.2) == []
    arrive(made, "fg", 0.3, key=2)
    assert made.take(1.0) == ["a"]
    assert made.take(1.0) == ["f", "g"]


def test_sizes_add_up_and_what_is_larger_than_a_batch_runs_alone() -> None:
    """A batch never gets larger than it may, nothing is overtaken, and a large item closes the batch before it."""
    made = policy(4)
    made.arrive("a", "", 3, 0.0)
    made.arrive("b", "", 2, 0.0)
    assert made.take(0.0) == ["a"]
    made.arrive("c", "", 9, 0.0)
    made.arrive("d", "", 1, 0.0)
    assert made.take(0.0) == ["b"]
    assert made.take(0.0) == ["c"]
    assert made.take(0.0) == []
    assert made.take(1.0) == ["d"]


def test_an_eager_batch_leaves_while_nothing_else_runs() -> None:
    """Eager batches do not wait for company if there is nobody to wait behind."""
    made = policy(4, eager=True)
    arrive(made, "ab")
    assert made.take(0.0) == []
    assert (made.next_time(), made.next_time(idle=True)) == (1.0, -math.inf)
    assert made.take(0.0, idle=True) == ["a", "b"]


def test_more_items_than_may_wait_are_refused() -> None:
    """The queue is bounded; what leaves it makes room."""
    made = policy(9, max_waiting=2)
    arrive(made, "ab")
    with pytest.raises(Overloaded, match="queue for batches is full: 2 requests wait"):
        arrive(made, "c")
    made.leave("a")
    arrive(made, "c")
    assert made.take(math.inf) == ["b", "c"]


def test_without_a_timeout_only_full_batches_leave_until_the_end_of_time() -> None:
    """An infinite timeout waits for a full batch; an infinite time takes whatever there is."""
    made = policy(2, math.inf)
    arrive(made, "abc")
    assert made.take(1e9) == ["a", "b"]
    assert made.take(1e9) == []
    assert made.take(math.inf) == ["c"]


@pytest.mark.parametrize(("size", "timeout", "waiting"), [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, math.nan, 1)])
def test_options_that_make_no_sense_are_refused(size: int, timeout: float, waiting: int) -> None:
    """Bounds are checked where they are written."""
    with pytest.raises(ValueError, match="must be 1 or more"):
        BatchOptions(size, timeout, waiting)


def test_an_item_arrives_once_and_has_a_size() -> None:
    """What would break the bookkeeping is refused."""
    made = policy()
    arrive(made, "a")
    with pytest.raises(ValueError, match="arrives once"):
        arrive(made, "a")
    with pytest.raises(ValueError, match="size of 1 or more"):
        made.arrive("b", "", 0, 0.0)


def test_clearing_gives_everything_back_in_the_order_of_arrival() -> None:
    """After an end nothing waits."""
    made = policy(2)
    arrive(made, "a", key=1)
    arrive(made, "bc", key=2)
    assert made.clear() == ["a", "b", "c"]
    assert (len(made), made.take(math.inf)) == (0, [])


@dataclass
class _Waiting:
    number: int
    key: int
    size: int
    arrived: float


class _AgainstTheRules(RuleBasedStateMachine):
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
        gone = data.draw(st.sampled_from(self.waiting))
        self.made.leave(gone.number)
        self.waiting.remove(gone)

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
    def worker_is_free(self) -> None:
        fronts = self._fronts()
        taken = self.made.take(self.now)
        assert taken == ([item.number for item in fronts[0]] if fronts else [])
        self.waiting = [item for item in self.waiting if item.number not in taken]

    @invariant()
    def is_looked_at_in_time(self) -> None:
        if not hasattr(self, "made"):
            return
        assert len(self.made) == len(self.waiting)
        when = self.made.next_time()
        assert (when <= self.now) == bool(self._fronts())
        if when > self.now:
            first = min((item.arrived for item in self.waiting), default=math.inf)
            assert when == first + self.options.timeout_seconds


TestAgainstTheRules = _AgainstTheRules.TestCase
