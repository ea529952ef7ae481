"""Which address a call goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.remote.breaker import Breaker
from ovmstrio.runtimes.remote.sequence import SequenceStep
from ovmstrio.runtimes.remote.targets import Target, Targets
from tests.support.remote_endpoints import FakeEndpoint


def _targets(count: int) -> Targets:
    return Targets([Target(FakeEndpoint(f"grpc://h{number}:1"), Breaker(1, 10)) for number in range(count)])


def test_addresses_take_turns_and_those_that_are_not_well_come_last() -> None:
    """One whose circuit is open is left out, and so is one that was tried."""
    targets = _targets(3)
    a, b, c = targets.all
    assert {targets.choose(0) for _ in range(3)} == {a, b, c}
    b.ailment = "gone"
    assert all(targets.choose(0) is not b for _ in range(6))
    assert targets.choose(0, {a, c}) is b
    c.breaker.fail(0)
    assert {targets.choose(0) for _ in range(6)} == {a}
    assert targets.choose(0, {a, b}) is None


def test_an_obstacle_is_told_only_when_no_address_is_left() -> None:
    """With the reason of each."""
    targets = _targets(2)
    targets.all[0].ailment = "refused"
    assert targets.obstacle(0) == ""
    targets.all[1].breaker.fail(0)
    told = "grpc://h0:1: refused; grpc://h1:1: left alone for 7.0 s more, after 1 failures in a row"
    assert targets.obstacle(3) == told


@given(st.lists(st.integers(1, 2**64 - 1) | st.text(min_size=1), min_size=1, max_size=20), st.data())
def test_a_sequence_stays_where_it_began(ids: list[int | str], data: st.DataObject) -> None:
    """Whatever becomes of the addresses meanwhile, and without being remembered if all were well when it began."""
    targets = _targets(4)
    began = {}
    for each in ids:
        for target in targets.all:
            target.ailment = data.draw(st.sampled_from(["", "", "gone"]))
        began[each] = targets.of_sequence(SequenceStep(each, starts=True, ends=False), 0)
        if any(not target.ailment for target in targets.all):
            assert not began[each].ailment
    for target in targets.all:
        target.ailment = data.draw(st.sampled_from(["", "gone"]))
    for each, target in began.items():
        assert targets.of_sequence(SequenceStep(each, starts=False, ends=False), 0) is target


def test_a_server_that_is_started_anew_finds_the_sequences() -> None:
    """Their ids say where they are."""
    first, second = _targets(5), _targets(5)
    for number in range(1, 200):
        begun = first.of_sequence(SequenceStep(number, starts=True, ends=False), 0)
        found = second.of_sequence(SequenceStep(number, starts=False, ends=False), 0)
        assert begun.endpoint.address == found.endpoint.address
