"""Quotas per caller: requests per second, concurrent requests and tokens per minute."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import CallerLimited
from ovmstrio.core.worker_peers import TokenBucketLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.auth.key_file import CallerEntry
    from ovmstrio.core.worker_peers import Counters

_MINUTE: Final = 60.0
_ALMOST_ONE: Final = 1 - 1e-9
"""Tolerance for rounding errors of sums."""


class TokenBucket:
    """Token bucket.

    Args:
        burst: capacity; by default the tokens of one second, at least 1.
    """

    __slots__ = ("_burst", "_clock", "_filled_at", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float = 0, clock: Callable[[], float] = trio.current_time) -> None:
        self._rate = rate
        self._burst = burst or max(1.0, rate)
        self._clock = clock
        self._tokens = self._burst
        self._filled_at: float | None = None

    @property
    def level(self) -> TokenBucketLevel:
        """Tokens left and the time of the count."""
        return TokenBucketLevel(self._tokens, self._filled_at or 0.0)

    @level.setter
    def level(self, level: TokenBucketLevel) -> None:
        self._tokens, self._filled_at = level if level.filled_at else (self._burst, None)

    def acquire(self) -> float:
        """Take a token; return 0, or the seconds until one is available."""
        seconds = self.wait()
        if not seconds:
            self._tokens -= 1
        return seconds

    def wait(self) -> float:
        """Return the seconds until a token is available; 0 if there is one."""
        now = self._clock()
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return 0.0 if self._tokens >= _ALMOST_ONE else (1 - self._tokens) / self._rate

    def spend(self, number: int) -> None:
        """Remove tokens, possibly below zero: the debt must be refilled before the next request."""
        self.wait()
        self._tokens -= number


class CallerQuota:
    """Quota of one caller."""

    __slots__ = ("_bucket", "_concurrency", "_name", "_rate", "_token_bucket", "_tokens_per_minute", "in_flight")

    def __init__(
        self,
        name: str,
        requests_per_second: float = 0,
        concurrency: int = 0,
        tokens_per_minute: int = 0,
        *,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._name = name
        self._rate = requests_per_second
        self._bucket = TokenBucket(requests_per_second, clock=clock) if requests_per_second else None
        self._tokens_per_minute = tokens_per_minute
        per_second = tokens_per_minute / _MINUTE
        self._token_bucket = TokenBucket(per_second, tokens_per_minute, clock) if tokens_per_minute else None
        self._concurrency = concurrency
        self.in_flight = 0

    def acquire(self) -> None:
        """Count a new request.

        Raises:
            CallerLimited: the quota is exceeded; the message has the limit and the retry time.
        """
        if self._concurrency and self.in_flight >= self._concurrency:
            raise CallerLimited(f"caller {self._name!r}: limit of {self.in_flight} concurrent requests reached")
        seconds = self._bucket.acquire() if self._bucket is not None else 0.0
        if seconds:
            text = f"{self._name!r} is limited to {self._rate:g} requests per second; try again in {seconds:.2g} s"
            raise CallerLimited(text, retry_after_seconds=seconds)
        self.in_flight += 1

    def release(self) -> None:
        """Release the slot of a finished request."""
        self.in_flight -= 1

    def check_tokens(self) -> None:
        """Check the token quota; :meth:`spend_tokens` counts the tokens later.

        Raises:
            CallerLimited: earlier requests have used up the quota.
        """
        seconds = self._token_bucket.wait() if self._token_bucket is not None else 0.0
        if seconds:
            limit = f"{self._tokens_per_minute} tokens per minute"
            text = f"{self._name!r} is limited to {limit}; try again in {seconds:.2g} s"
            raise CallerLimited(text, retry_after_seconds=seconds)

    def spend_tokens(self, number: int) -> None:
        """Count prompt or completion tokens."""
        if self._token_bucket is not None:
            self._token_bucket.spend(number)


# Shared quotas


class SharedQuota(CallerQuota):
    """Quota of one caller, counted exactly in memory shared by all workers."""

    __slots__ = ("_counters", "_shared_counters")

    def __init__(self, counters: Counters, entry: CallerEntry) -> None:
        limits = entry.requests_per_second, entry.concurrency, entry.tokens_per_minute
        # trio's clock differs between processes.
        super().__init__(entry.name, *limits, clock=time.monotonic)
        self._shared_counters = counters
        # The key contains all settings, so that counts continue only while a caller is unchanged.
        self._counters = counters.row(f"caller {entry!r}")

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Load the shared counts for the block and store them afterwards."""
        buckets = [(number, each) for number, each in enumerate((self._bucket, self._token_bucket)) if each is not None]
        with self._shared_counters.locked():
            elsewhere = self._counters.elsewhere().in_flight
            self.in_flight = self._counters.in_flight + elsewhere
            for number, each in buckets:
                each.level = self._counters.bucket(number)
            try:
                yield
            finally:
                self._counters.write(self.in_flight - elsewhere)
                for number, each in buckets:
                    self._counters.fill(number, each.level)

    def acquire(self) -> None:
        """Count a new request; raises CallerLimited if the quota is exceeded."""
        with self._synchronized():
            super().acquire()

    def release(self) -> None:
        """Release the slot of a finished request."""
        with self._synchronized():
            super().release()

    def check_tokens(self) -> None:
        """Check the token quota; raises CallerLimited if earlier requests have used up the quota."""
        if self._token_bucket is not None:
            with self._synchronized():
                super().check_tokens()

    def spend_tokens(self, number: int) -> None:
        """Count prompt or completion tokens."""
        if self._token_bucket is not None and number:
            with self._synchronized():
                super().spend_tokens(number)
