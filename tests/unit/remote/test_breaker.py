"""When an address is left alone."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.runtimes.remote.breaker import Breaker


def test_so_many_failures_in_a_row_open_the_circuit_and_one_call_closes_it() -> None:
    """A success in between begins the count anew; while one call tries, no other one may."""
    breaker = Breaker(2, 10)
    breaker.begin()
    breaker.fail(0)
    breaker.succeed()
    breaker.fail(1)
    assert breaker.allows(1)
    breaker.fail(2)
    assert not breaker.allows(11.9)
    assert breaker.seconds_left(5) == 7
    assert breaker.allows(12)
    breaker.begin()
    assert not breaker.allows(12)
    breaker.succeed()
    assert breaker.allows(12)
    assert breaker.failures_in_row == 0


def test_a_call_that_tries_and_fails_opens_it_again() -> None:
    """For as long as before; one that was cancelled lets the next one try."""
    breaker = Breaker(1, 10)
    breaker.fail(0)
    breaker.begin()
    breaker.abandon()
    assert breaker.allows(10)
    breaker.begin()
    breaker.fail(15)
    assert not breaker.allows(24)
    assert breaker.allows(25)


def test_without_a_number_of_failures_it_never_opens() -> None:
    """Whatever happens."""
    breaker = Breaker(0, 10)
    for _ in range(1000):
        breaker.begin()
        breaker.fail(0)
    assert breaker.allows(0)


class BreakerModel(RuleBasedStateMachine):
    """Calls that begin and end in any order, against what is said of a circuit."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(3, 10)
        self.now = 0.0
        self.in_row = 0
        self.closed_until_failure = True
        self.opened = 0.0
        self.under_way: list[bool] = []

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now) and not self.under_way)
    @rule()
    def begin(self) -> None:
        """Make a call."""
        self.breaker.begin()
        self.under_way.append(True)

    @precondition(lambda self: self.under_way)
    @rule()
    def succeed(self) -> None:
        """Let it succeed."""
        self.under_way.pop()
        self.breaker.succeed()
        self.in_row, self.closed_until_failure = 0, True

    @precondition(lambda self: self.under_way)
    @rule()
    def abandon(self) -> None:
        """Let it be cancelled."""
        self.under_way.pop()
        self.breaker.abandon()

    @precondition(lambda self: self.under_way)
    @rule()
    def fail(self) -> None:
        """Let it fail."""
        self.under_way.pop()
        self.breaker.fail(self.now)
        self.in_row += 1
        if self.in_row >= 3 or not self.closed_until_failure:
            self.closed_until_failure, self.opened = False, self.now

    @invariant()
    def is_open_for_as_long_as_configured(self) -> None:
        """It refuses calls for ten seconds after the failure that opened it, and at no other time."""
        if self.under_way:
            return
        expected = self.closed_until_failure or self.now >= self.opened + 10
        assert self.breaker.allows(self.now) == expected


TestBreakerModel = BreakerModel.TestCase
