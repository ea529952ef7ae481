from __future__ import annotations

from tests.support.policies import Fed

BASE = 'timestamp_base_tag_index: "A:0"'


def test_before_the_clocks_are_known_the_base_runs_alone() -> None:
    """Packets of the base pass at once, and those of the others wait."""
    fed = Fed("TimestampAlign", ["A", "B"], BASE)
    fed.push(A=[10, 11])
    assert fed.runs() == [(10, {"A": 10}), (11, {"A": 11})]
    fed.push(B=1000)
    assert fed.next() is None


def test_the_first_packets_that_meet_are_simultaneous() -> None:
    """B is told on the clock of A from then on."""
    fed = Fed("TimestampAlign", ["A", "B"], BASE)
    fed.push(B=[1000, 1001, 1005])
    fed.push(A=12)
    assert fed.runs() == [(12, {"A": 12, "B": 1000})]
    fed.push(A=15)
    assert fed.runs() == [(13, {"B": 1001}), (15, {"A": 15})]
    fed.push(A=17)
    assert fed.runs() == [(17, {"A": 17, "B": 1005})]


def test_bounds_are_moved_as_packets_are() -> None:
    """After the offset of 90 a bound of 103 on B settles 12 on A, and one of 102 does not."""
    fed = Fed("TimestampAlign", ["A", "B"], BASE)
    fed.push(A=10, B=100)
    assert fed.runs() == [(10, {"A": 10, "B": 100})]
    fed.push(A=12)
    fed.advance("B", 102)
    assert fed.next() is None
    fed.advance("B", 103)
    assert fed.runs() == [(12, {"A": 12})]


def test_the_base_need_not_be_the_first_input() -> None:
    """The option names it."""
    fed = Fed("TimestampAlign", ["A", "B"], 'timestamp_base_tag_index: "B"')
    fed.push(A=5, B=500)
    assert fed.runs() == [(500, {"A": 5, "B": 500})]


def test_it_closes_when_all_inputs_are_done() -> None:
    """An input that has ended is settled for ever."""
    fed = Fed("TimestampAlign", ["A", "B"], BASE)
    fed.push(A=[10, 12], B=100)
    fed.close("B")
    assert fed.runs() == [(10, {"A": 10, "B": 100}), (12, {"A": 12})]
    assert fed.next() is None
    fed.close("A")
    assert fed.next() == "close"


def test_it_closes_with_the_base_where_the_clocks_never_met() -> None:
    """Nothing can be said about packets that wait for a base that has ended."""
    fed = Fed("TimestampAlign", ["A", "B"], BASE)
    fed.push(B=100)
    fed.close("A")
    assert fed.next() == "close"
