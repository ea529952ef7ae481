from __future__ import annotations

import pytest

from tests.support.policies import Fed


def test_without_options_the_newest_of_two_packets_is_kept() -> None:
    """The queue is cut at two packets down to one."""
    fed = Fed("FixedSize", ["A"])
    fed.push(A=[1, 2, 3])
    assert fed.waiting("A") == [3]
    assert fed.runs() == [(3, {"A": 3})]


def test_a_node_that_keeps_up_loses_nothing() -> None:
    """Only what waits is dropped."""
    fed = Fed("FixedSize", ["A"])
    seen = []
    for timestamp in range(4):
        fed.push(A=timestamp)
        seen += fed.runs()
    assert [timestamp for timestamp, _ in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("trigger", "target", "kept"),
    [(2, 1, [6]), (3, 1, [5, 6]), (3, 2, [5, 6]), (4, 1, [4, 5, 6]), (4, 3, [4, 5, 6]), (9, 1, [1, 2, 3, 4, 5, 6])],
)
def test_a_queue_that_reaches_the_trigger_is_cut_to_the_target(trigger: int, target: int, kept: list[int]) -> None:
    """Between two cuts the queue grows again."""
    fed = Fed("FixedSize", ["A"], f"trigger_queue_size: {trigger} target_queue_size: {target}")
    fed.push(A=range(1, 7))
    assert fed.waiting("A") == kept


def test_a_silent_input_does_not_let_the_others_grow() -> None:
    """The queue stays short while nothing comes on B, so that whoever feeds A never has to wait."""
    fed = Fed("FixedSize", ["A", "B"], limit=2)
    for timestamp in range(50):
        assert not fed.streams["A"].is_full
        fed.push(A=timestamp)
    assert fed.waiting("A") == [49]
    assert fed.next() is None


def test_all_inputs_are_cut_at_one_timestamp() -> None:
    """What is dropped from A is dropped from B, so that runs are whole."""
    fed = Fed("FixedSize", ["A", "B", "C"], "trigger_queue_size: 3 target_queue_size: 1")
    fed.push(B=[1, 2], A=[1, 2, 3])
    assert fed.waiting("A") == [3]
    assert fed.waiting("B") == []
    fed.push(B=3, C=3)
    assert fed.runs() == [(3, {"A": 3, "B": 3, "C": 3})]


def test_what_comes_late_is_dropped_like_what_came_in_time() -> None:
    """A: 1 to 6, B: 3 to 7, four packets cut to three: 5 is the first that is kept, also on C."""
    fed = Fed("FixedSize", ["A", "B", "C"], "trigger_queue_size: 4 target_queue_size: 3")
    fed.push(A=range(1, 7), B=range(3, 8))
    assert fed.waiting("A") == [5, 6]
    assert fed.waiting("B") == [5, 6, 7]
    seen = []
    for timestamp in range(4, 8):
        fed.push(C=timestamp)
        seen += fed.runs()
    fed.close("A", "B", "C")
    seen += fed.runs()
    assert seen == [
        (5, {"A": 5, "B": 5, "C": 5}),
        (6, {"A": 6, "B": 6, "C": 6}),
        (7, {"B": 7, "C": 7}),
    ]


def test_with_a_fixed_minimum_nothing_is_dropped_until_every_queue_is_long() -> None:
    """The same packets as above, all of which are delivered, for C never has four."""
    fed = Fed("FixedSize", ["A", "B", "C"], "trigger_queue_size: 4 target_queue_size: 3 fixed_min_size: true")
    fed.push(A=range(1, 7), B=range(3, 8))
    seen = []
    for timestamp in range(4, 8):
        fed.push(C=timestamp)
        seen += fed.runs()
    fed.close("A", "B", "C")
    seen += fed.runs()
    found = {tag: [inputs[tag] for _, inputs in seen if tag in inputs] for tag in "ABC"}
    assert found == {"A": [1, 2, 3, 4, 5, 6], "B": [3, 4, 5, 6, 7], "C": [4, 5, 6, 7]}


def test_with_a_fixed_minimum_the_shortest_tail_decides() -> None:
    """Every queue keeps at least the target, and what lies beside it."""
    fed = Fed("FixedSize", ["A", "B"], "trigger_queue_size: 3 target_queue_size: 2 fixed_min_size: true")
    fed.push(A=[1, 2, 3], B=[1, 5])
    assert fed.waiting("A") == [1, 2, 3]
    fed.push(B=6)
    assert fed.waiting("A") == [2, 3]
    assert fed.waiting("B") == [5, 6]


def test_it_closes_as_the_default() -> None:
    """All inputs are done and empty."""
    fed = Fed("FixedSize", ["A", "B"])
    fed.push(A=[1, 2])
    fed.close("A", "B")
    assert fed.next() == (2, {"A": 2})
    assert fed.next() == "close"
