from __future__ import annotations

from tests.support.policies import Fed


def test_it_runs_once_every_input_has_a_packet() -> None:
    """Timestamps need not agree; the run has the earliest."""
    fed = Fed("Barrier", ["A", "B"])
    fed.push(A=[7, 8])
    assert fed.next() is None
    fed.push(B=3)
    assert fed.next() == (3, {"A": 7, "B": 3})
    assert fed.next() is None
    assert fed.waiting("A") == [8]


def test_bounds_settle_nothing() -> None:
    """An input without a packet is waited for however far its bound is."""
    fed = Fed("Barrier", ["A", "B"])
    fed.push(A=1)
    fed.advance("B", 1000)
    assert fed.next() is None


def test_runs_ascend() -> None:
    """Packets are paired by their number on the input."""
    fed = Fed("Barrier", ["A", "B"])
    fed.push(A=[5, 6, 30], B=[1, 20, 21])
    assert [timestamp for timestamp, _ in fed.runs()] == [1, 6, 21]


def test_it_closes_with_the_first_input_that_is_done() -> None:
    """What waits on the others has no partner any more."""
    fed = Fed("Barrier", ["A", "B"])
    fed.push(A=[1, 2], B=1)
    fed.close("B")
    assert fed.next() == (1, {"A": 1, "B": 1})
    assert fed.next() == "close"
