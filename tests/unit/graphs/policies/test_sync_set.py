from __future__ import annotations

import pytest

from tests.support.policies import Fed

# One set: the default.


def test_default_waits_for_an_input_that_may_still_have_the_timestamp() -> None:
    """A packet alone does not run the node: its partner at the same timestamp may come."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=5)
    assert fed.next() is None
    fed.push(B=5)
    assert fed.next() == (5, {"A": 5, "B": 5})
    assert fed.next() is None


def test_default_decides_that_an_input_is_missing_when_a_later_packet_comes() -> None:
    """A later packet on B tells that B has nothing at the earlier timestamp."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=5, B=7)
    assert fed.runs() == [(5, {"A": 5})]
    fed.push(A=7)
    assert fed.runs() == [(7, {"A": 7, "B": 7})]


def test_default_decides_that_an_input_is_missing_when_it_ends() -> None:
    """All that waits runs when the other input is closed."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=[5, 6])
    fed.close("B")
    assert fed.runs() == [(5, {"A": 5}), (6, {"A": 6})]


@pytest.mark.parametrize(("bound", "expected"), [(5, []), (6, [(5, {"A": 5})]), (7, [(5, {"A": 5}), (6, {"A": 6})])])
def test_default_runs_what_lies_below_every_bound(bound: int, expected: list[object]) -> None:
    """A bound settles the timestamps below it, and not its own."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=[5, 6])
    fed.advance("B", bound)
    assert fed.runs() == expected


def test_default_never_goes_back_in_time() -> None:
    """A packet behind one that waits elsewhere comes first."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=[3, 9], B=[1, 9])
    assert fed.runs() == [(1, {"B": 1}), (3, {"A": 3}), (9, {"A": 9, "B": 9})]


def test_default_closes_when_all_inputs_are_done_and_empty() -> None:
    """Closed inputs with packets are not done yet."""
    fed = Fed("Default", ["A", "B"])
    fed.push(A=1)
    fed.close("A")
    assert fed.next() is None
    fed.close("B")
    assert fed.next() == (1, {"A": 1})
    assert fed.next() == "close"


def test_values_come_in_the_order_of_tags() -> None:
    """The order of arrival does not matter."""
    fed = Fed("Default", ["A", "B", "C"])
    fed.push(C=1, A=1, B=1)
    step = fed.next()
    assert isinstance(step, tuple)
    assert list(step[1]) == ["A", "B", "C"]


# Any input that ends.


def test_early_close_behaves_as_the_default_while_all_inputs_live() -> None:
    """Readiness is that of one sync set."""
    fed = Fed("EarlyClose", ["A", "B"])
    fed.push(A=1)
    assert fed.next() is None
    fed.push(B=2)
    assert fed.runs() == [(1, {"A": 1})]


def test_early_close_ends_with_the_first_input_that_is_done() -> None:
    """Packets that wait on other inputs are left."""
    fed = Fed("EarlyClose", ["A", "B"])
    fed.push(A=[1, 2])
    fed.close("B")
    assert fed.next() == "close"


def test_early_close_first_uses_up_the_packets_of_the_input_that_ended() -> None:
    """An input that is closed and holds packets is not done."""
    fed = Fed("EarlyClose", ["A", "B"])
    fed.push(A=[1, 2], B=1)
    fed.close("B")
    assert fed.next() == (1, {"A": 1, "B": 1})
    assert fed.next() == "close"


# Several sets.


def test_sets_run_each_for_itself() -> None:
    """An input in another set is not waited for."""
    fed = Fed("SyncSet", ["A", "B"], 'sync_set { tag_index: "B:0" }')
    fed.push(A=5)
    assert fed.runs() == [(5, {"A": 5})]
    fed.push(B=3)
    assert fed.runs() == [(3, {"B": 3})]


def test_the_earliest_of_the_ready_sets_runs() -> None:
    """Order of declaration does not matter where timestamps differ."""
    fed = Fed("SyncSet", ["A", "B"], 'sync_set { tag_index: "A" } sync_set { tag_index: "B" }')
    fed.push(A=5, B=3)
    assert fed.runs() == [(3, {"B": 3}), (5, {"A": 5})]


@pytest.mark.parametrize(("first", "second"), [("A", "B"), ("B", "A")])
def test_of_equal_timestamps_the_set_declared_first_runs(first: str, second: str) -> None:
    """Two sets never share a run."""
    sets = f'sync_set {{ tag_index: "{first}" }} sync_set {{ tag_index: "{second}" }}'
    fed = Fed("SyncSet", ["A", "B"], sets)
    fed.push(A=5, B=5)
    assert fed.runs() == [(5, {first: 5}), (5, {second: 5})]


def test_inputs_in_no_set_form_the_last() -> None:
    """A loopback in a set of its own goes before an input at the same timestamp, and the inputs stay together."""
    fed = Fed("SyncSet", ["A", "B", "LOOPBACK"], 'sync_set { tag_index: "LOOPBACK:0" }')
    fed.push(A=5, LOOPBACK=5)
    assert fed.runs() == [(5, {"LOOPBACK": 5})]
    fed.push(B=5)
    assert fed.runs() == [(5, {"A": 5, "B": 5})]


def test_one_of_two_inputs_of_a_set_waits_while_another_set_runs() -> None:
    """A set that is not ready does not hold up the others, even with an earlier packet."""
    fed = Fed("SyncSet", ["A", "B", "C"], 'sync_set { tag_index: "A" tag_index: "B" }')
    fed.push(A=1, C=9)
    assert fed.runs() == [(9, {"C": 9})]
    fed.push(B=4)
    assert fed.runs() == [(1, {"A": 1})]


def test_the_values_of_a_set_come_in_the_order_of_tags() -> None:
    """However the set lists them."""
    fed = Fed("SyncSet", ["A", "B", "C"], 'sync_set { tag_index: "C" tag_index: "A" tag_index: "B" }')
    fed.push(A=1, B=1, C=1)
    step = fed.next()
    assert isinstance(step, tuple)
    assert list(step[1]) == ["A", "B", "C"]


def test_without_options_all_inputs_are_one_set() -> None:
    """The handler without its message is the default."""
    fed = Fed("SyncSet", ["A", "B"])
    fed.push(A=5)
    assert fed.next() is None
    fed.push(B=5)
    assert fed.runs() == [(5, {"A": 5, "B": 5})]


def test_a_node_with_sets_closes_when_all_of_them_are_done() -> None:
    """The sets that are left go on after one has ended."""
    fed = Fed("SyncSet", ["A", "B"], 'sync_set { tag_index: "A" }')
    fed.close("A")
    assert fed.next() is None
    fed.push(B=1)
    assert fed.next() == (1, {"B": 1})
    fed.close("B")
    assert fed.next() == "close"


def test_the_indexes_of_a_tag_are_told_apart() -> None:
    """An index that is no input of the node is a mistake of the file, found when it is loaded, not here."""
    with pytest.raises(KeyError):
        Fed("SyncSet", ["A"], 'sync_set { tag_index: "A:1" }')


# Every input for itself.


def test_immediate_runs_at_once() -> None:
    """No input waits for another."""
    fed = Fed("Immediate", ["A", "B"])
    fed.push(A=5)
    assert fed.next() == (5, {"A": 5})
    fed.push(B=5)
    assert fed.next() == (5, {"B": 5})


def test_immediate_may_go_back_in_time() -> None:
    """Timestamps ascend on each input, and not from run to run."""
    fed = Fed("Immediate", ["A", "B"])
    fed.push(A=5)
    assert fed.next() == (5, {"A": 5})
    fed.push(B=3)
    assert fed.next() == (3, {"B": 3})


def test_immediate_takes_the_earliest_and_what_lies_beside_it() -> None:
    """Heads at one timestamp share a run."""
    fed = Fed("Immediate", ["A", "B", "C"])
    fed.push(A=5, B=[3, 5], C=3)
    assert fed.runs() == [(3, {"B": 3, "C": 3}), (5, {"A": 5, "B": 5})]


def test_immediate_is_not_run_without_packets_when_an_input_ends() -> None:
    """MediaPipe does that; handlers that read their first input would fail at the end of every stream."""
    fed = Fed("Immediate", ["A", "B"])
    fed.close("A")
    assert fed.next() is None
    fed.push(B=1)
    fed.close("B")
    assert fed.next() == (1, {"B": 1})
    assert fed.next() == "close"
