from __future__ import annotations

import pytest

from ovmstrio.runtimes.graphs.timestamps import DONE
from tests.support.policies import Fed

TAGS = ["A", "B", "SELECT"]


def test_the_control_input_says_which_input_is_read() -> None:
    """The last input by tag holds the number of another."""
    fed = Fed("Mux", TAGS)
    fed.push(A=1, B=1)
    assert fed.next() is None
    fed.put("SELECT", 1, 1)
    assert fed.next() == (1, {"B": 1, "SELECT": 1})


def test_what_was_not_chosen_is_dropped() -> None:
    """An input that is not read does not fill up."""
    fed = Fed("Mux", TAGS)
    fed.push(A=[1, 2, 3], B=[1, 2, 3])
    fed.put("SELECT", 2, 0)
    assert fed.next() == (2, {"A": 2, "SELECT": 0})
    assert (fed.waiting("A"), fed.waiting("B")) == ([3], [3])


def test_it_waits_for_the_packet_of_the_chosen_input() -> None:
    """A choice is not made void by a packet elsewhere."""
    fed = Fed("Mux", TAGS)
    fed.put("SELECT", 4, 0)
    fed.push(B=4)
    assert fed.next() is None
    fed.push(A=4)
    assert fed.next() == (4, {"A": 4, "SELECT": 0})


@pytest.mark.parametrize("bound", [5, 9, DONE])
def test_a_chosen_input_that_can_have_nothing_at_the_timestamp_is_missing(bound: int) -> None:
    """Its bound tells that, and so does its end."""
    fed = Fed("Mux", TAGS)
    fed.put("SELECT", 4, 0)
    fed.advance("A", 4)
    assert fed.next() is None
    fed.advance("A", bound)
    assert fed.next() == (4, {"SELECT": 0})


def test_a_later_packet_tells_that_the_chosen_input_has_nothing() -> None:
    """It stays for the control packet of its own timestamp."""
    fed = Fed("Mux", TAGS)
    fed.put("SELECT", 4, 0)
    fed.push(A=9)
    assert fed.next() == (4, {"SELECT": 0})
    assert fed.waiting("A") == [9]


def test_the_end_of_a_chosen_input_does_not_end_the_others() -> None:
    """The control input may choose another next time."""
    fed = Fed("Mux", TAGS)
    fed.close("A")
    fed.put("SELECT", 1, 0)
    fed.put("SELECT", 2, 1)
    fed.push(B=2)
    assert fed.runs() == [(1, {"SELECT": 0}), (2, {"B": 2, "SELECT": 1})]
    assert fed.next() is None


def test_it_closes_with_the_control_input() -> None:
    """Packets that wait elsewhere will never be chosen."""
    fed = Fed("Mux", TAGS)
    fed.push(A=1)
    fed.close("SELECT")
    assert fed.next() == "close"
