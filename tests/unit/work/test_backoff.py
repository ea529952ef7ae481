"""Pauses that grow while something fails."""

from __future__ import annotations

from ovmstrio.work.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    """Whoever is told to wait waits longer after each failure in a row, for ever if need be."""
    backoff = Backoff(0.25, 3.0)
    assert [backoff.seconds_after() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.seconds_after() for _ in range(2)] == [0.25, 0.5]
    assert {backoff.seconds_after() for _ in range(5000)} == {1.0, 2.0, 3.0}


def test_pauses_may_stay_the_same() -> None:
    """A factor of one makes every pause the first."""
    backoff = Backoff(10.0, 10.0, factor=1.0)
    assert [backoff.seconds_after() for _ in range(3)] == [10.0] * 3


def test_what_has_lived_long_begins_again_with_the_first_pause() -> None:
    """A process that ran for an hour is no worse than a new one; one that just made it over the limit neither."""
    backoff = Backoff(1.0, 60.0, 5.0)
    assert [backoff.seconds_after(lived) for lived in (0, 5, 5.1, 0, 3600, 0)] == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
