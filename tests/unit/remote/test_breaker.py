"""The circuit breaker of an address."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.runtimes.remote.breaker import Breaker


def test_failures_in_a_row_open_the_circuit_and_a_success_closes_it() -> None:
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


def test_a_failed_trial_call_opens_the_circuit_again() -> None:
    breaker = Breaker(1, 10)
    breaker.fail(0)
    breaker.begin()
    breaker.abandon()
    assert breaker.allows(10)
    breaker.begin()
    breaker.fail(15)
    assert not breaker.allows(24)
    assert breaker.allows(25)


def test_a_breaker_without_a_limit_never_opens() -> None:
    breaker = Breaker(0, 10)
    for _ in range(1000):
        breaker.begin()
        breaker.fail(0)
    assert breaker.allows(0)


class _BreakerModel(RuleBasedStateMachine):
    """Calls that begin and end in any order, compared with a simple model of a breaker."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(3, 10)
        self.now = 0.0
        self.in_row = 0
        self.closed_until_failure = True
        self.opened = 0.0
        self.ongoing: list[bool] = []

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now) and not self.ongoing)
    @rule()
    def begin(self) -> None:
        self.breaker.begin()
        self.ongoing.append(True)

    @precondition(lambda self: self.ongoing)
    @rule()
    def succeed(self) -> None:
        self.ongoing.pop()
        self.breaker.succeed()
        self.in_row, self.closed_until_failure = 0, True

    @precondition(lambda self: self.ongoing)
    @rule()
    def abandon(self) -> None:
        self.ongoing.pop()
        self.breaker.abandon()

    @precondition(lambda self: self.ongoing)
    @rule()
    def fail(self) -> None:
        self.ongoing.pop()
        self.breaker.fail(self.now)
        self.in_row += 1
        if self.in_row >= 3 or not self.closed_until_failure:
            self.closed_until_failure, self.opened = False, self.now

    @invariant()
    def is_open_for_as_long_as_configured(self) -> None:
        """Calls are refused for ten seconds after the failure that opened the circuit, and at no other time."""
        if self.ongoing:
            return
        expected = self.closed_until_failure or self.now >= self.opened + 10
        assert self.breaker.allows(self.now) == expected


TestBreaker = _BreakerModel.TestCase
