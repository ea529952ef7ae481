from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.graphs.timestamps import (
    DONE,
    MAX,
    MIN,
    UNSET,
    AutomaticTimestamps,
    is_range_value,
    next_allowed,
    show,
)

LOWEST = -(2**63)
HIGHEST = 2**63 - 1


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        (LOWEST, "Timestamp::Unset()"),
        (LOWEST + 1, "Timestamp::Unstarted()"),
        (LOWEST + 2, "Timestamp::PreStream()"),
        (LOWEST + 3, "Timestamp::Min()"),
        (LOWEST + 4, str(LOWEST + 4)),
        (-1, "-1"),
        (0, "0"),
        (HIGHEST - 4, str(HIGHEST - 4)),
        (HIGHEST - 3, "Timestamp::Max()"),
        (HIGHEST - 2, "Timestamp::PostStream()"),
        (HIGHEST - 1, "Timestamp::OneOverPostStream()"),
        (HIGHEST, "Timestamp::Done()"),
    ],
)
def test_special_timestamps_are_shown_by_name(timestamp: int, text: str) -> None:
    """The spelling is MediaPipe's; all others are numbers."""
    assert show(timestamp) == text


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (UNSET, False),
        (LOWEST + 1, False),
        (LOWEST + 2, False),
        (MIN, True),
        (0, True),
        (MAX, True),
        (HIGHEST - 2, False),
        (HIGHEST - 1, False),
        (DONE, False),
    ],
)
def test_reserved_numbers_are_no_timestamps_of_packets(timestamp: int, expected: bool) -> None:
    """Three at each end of int64 are reserved."""
    assert is_range_value(timestamp) is expected


@given(st.integers(MIN, MAX - 1))
def test_the_next_packet_may_come_one_later(timestamp: int) -> None:
    """Timestamps need not be consecutive, but they ascend."""
    assert next_allowed(timestamp) == timestamp + 1


def test_nothing_comes_after_the_largest_timestamp() -> None:
    """The stream is done with it."""
    assert next_allowed(MAX) == DONE


def test_automatic_timestamps_are_the_time_in_microseconds() -> None:
    """The client can compute the latency of its request."""
    before = time.time_ns() // 1000
    given_out = AutomaticTimestamps().next()
    assert before <= given_out <= time.time_ns() // 1000


def test_automatic_timestamps_ascend_however_fast_they_are_asked_for() -> None:
    """Two requests within one microsecond do not collide."""
    clock = AutomaticTimestamps()
    assert all(one < other for one, other in pairwise([clock.next() for _ in range(5000)]))


def test_a_clock_that_is_set_back_does_not_set_timestamps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one given is always passed."""
    times = iter([5_000_000, 1_000_000, 1_000_000, 9_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    clock = AutomaticTimestamps()
    assert [clock.next() for _ in range(4)] == [5000, 5001, 5002, 9000]
