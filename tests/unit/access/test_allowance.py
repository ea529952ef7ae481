"""How much a caller may ask for, by a clock that the test sets."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.access.allowance import CallerAllowance, TokenBucket
from ovmstrio.core.errors import CallerLimited


async def test_requests_per_second_are_limited_with_the_time_of_the_next(
    mock_clock: trio.testing.MockClock,
) -> None:
    allowance = CallerAllowance("shop", requests_per_second=4)
    for _ in range(4):
        allowance.take()
    with pytest.raises(CallerLimited, match=r"'shop' may make 4 requests a second; try again in 0.25 s") as caught:
        allowance.take()
    assert caught.value.retry_after_seconds == pytest.approx(0.25)
    mock_clock.jump(0.25)
    allowance.take()
    with pytest.raises(CallerLimited):
        allowance.take()
    assert allowance.under_way == 5


async def test_a_rate_below_one_per_second_admits_one_request(mock_clock: trio.testing.MockClock) -> None:
    allowance = CallerAllowance("shop", requests_per_second=0.1)
    allowance.take()
    mock_clock.jump(9.9)
    with pytest.raises(CallerLimited) as caught:
        allowance.take()
    assert caught.value.retry_after_seconds == pytest.approx(0.1)
    mock_clock.jump(0.1)
    allowance.take()


async def test_concurrent_requests_count_until_they_end() -> None:
    allowance = CallerAllowance("shop", concurrency=2)
    allowance.take()
    allowance.take()
    with pytest.raises(CallerLimited, match="'shop' has 2 requests under way"):
        allowance.take()
    allowance.give_back()
    allowance.take()
    assert allowance.under_way == 2


async def test_tokens_per_minute_are_limited_after_they_are_used(
    mock_clock: trio.testing.MockClock,
) -> None:
    allowance = CallerAllowance("shop", tokens_per_minute=120)
    allowance.check_tokens()
    allowance.spend_tokens(119)
    allowance.check_tokens()
    allowance.spend_tokens(31)
    refusal = r"'shop' may use 120 tokens a minute; try again in 16 s"
    with pytest.raises(CallerLimited, match=refusal) as caught:
        allowance.check_tokens()
    assert caught.value.retry_after_seconds == pytest.approx(15.5)
    mock_clock.jump(15.4)
    with pytest.raises(CallerLimited):
        allowance.check_tokens()
    mock_clock.jump(0.1)
    allowance.check_tokens()


async def test_tokens_and_requests_are_separate_limits() -> None:
    allowance = CallerAllowance("shop", concurrency=1, tokens_per_minute=1)
    allowance.spend_tokens(1000)
    allowance.take()
    other = CallerAllowance("shop", requests_per_second=1)
    other.spend_tokens(10**9)
    other.check_tokens()


@given(st.floats(0.1, 50), st.lists(st.floats(0, 3), max_size=60))
def test_no_interval_has_more_than_rate_and_burst(rate: float, pauses: list[float]) -> None:
    now = 0.0
    bucket = TokenBucket(rate, clock=lambda: now)
    passed: list[float] = []
    for pause in pauses:
        now += pause
        wait = bucket.take()
        if wait == 0:
            passed.append(now)
        else:
            now += wait
            assert bucket.take() == 0, "when it says so, there is one"
            passed.append(now)
    burst = max(1.0, rate)
    for first, start in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - start) * rate + 1e-3
