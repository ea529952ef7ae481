"""Nodes that run where it has become certain that no packet comes."""

from __future__ import annotations

from ovmstrio.runtimes.graphs.timestamps import MAX, MIN
from tests.support.policies import Fed


def test_together_a_node_runs_at_the_last_timestamp_that_is_settled() -> None:
    """With packets at theirs, and once without them for all that was settled since."""
    fed = Fed("Default", ["A", "B"], processes_bounds=True)
    fed.push(A=5)
    assert fed.next() is None
    fed.advance("B", 4)
    assert fed.runs() == [(3, {})]
    fed.advance("B", 9)
    assert fed.runs() == [(5, {"A": 5})]
    fed.advance("A", 8)
    assert fed.runs() == [(7, {})]
    fed.close("A", "B")
    assert fed.next() == "close"


def test_apart_the_end_of_each_input_is_told() -> None:
    """By a run at the largest timestamp, and the node closes when all have been told."""
    fed = Fed("Immediate", ["A", "B"], processes_bounds=True)
    fed.push(A=5)
    assert fed.next() == (5, {"A": 5})
    assert fed.settled == {"A": 5, "B": MIN - 1}
    fed.close("A")
    assert fed.next() == (MAX, {})
    assert fed.settled == {"A": MAX, "B": MIN - 1}
    fed.push(B=7)
    assert fed.runs() == [(7, {"B": 7})]
    fed.close("B")
    assert fed.next() == (MAX, {})
    assert fed.next() == "close"


def test_apart_inputs_that_are_settled_alike_share_a_run() -> None:
    """The earliest first; of an input with a packet ahead everything before it is settled."""
    fed = Fed("Immediate", ["A", "B"], processes_bounds=True)
    fed.push(A=5, B=[5, 8])
    assert fed.next() == (5, {"A": 5, "B": 5})
    assert fed.next() == (8, {"B": 8})
    assert fed.settled == {"A": 5, "B": 8}
    assert fed.next() is None
