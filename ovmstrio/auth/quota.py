"""How much a caller may ask for: requests a second, requests at once, and tokens of text a minute."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import CallerLimited
from ovmstrio.core.worker_peers import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.auth.key_file import CallerEntry
    from ovmstrio.core.worker_peers import Ledger

__all__ = ["CallerAllowance", "SharedAllowance", "TokenBucket"]

# ----------------------------------------------------------------------
# How much a caller may ask for: requests a second, requests at once, and tokens of text a minute
# ----------------------------------------------------------------------

_MINUTE: Final = 60.0
_ALMOST: Final = 1 - 1e-9
"""Sums of parts are not exact: what should be one may be a little less."""


class TokenBucket:
    """Lets so many pass a second on average, and as many as it holds at once.

    Args:
        rate: how many a second.
        burst: how many it holds; those of a second, but one at least, unless given.
        clock: gives seconds; trio's unless given.
    """

    __slots__ = ("_burst", "_clock", "_filled_at", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float = 0, clock: Callable[[], float] = trio.current_time) -> None:
        self._rate = rate
        self._burst = burst or max(1.0, rate)
        self._clock = clock
        self._tokens = self._burst
        self._filled_at: float | None = None

    @property
    def level(self) -> Bucket:
        """What is left, and when that was counted."""
        return Bucket(self._tokens, self._filled_at or 0.0)

    @level.setter
    def level(self, level: Bucket) -> None:
        self._tokens, self._filled_at = level if level.filled_at else (self._burst, None)

    def take(self) -> float:
        """Take one; gives 0, or the seconds after which there will be one where there is none."""
        seconds = self.wait()
        if not seconds:
            self._tokens -= 1
        return seconds

    def wait(self) -> float:
        """Give the seconds after which there will be one; 0 where there is one."""
        now = self._clock()
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return 0.0 if self._tokens >= _ALMOST else (1 - self._tokens) / self._rate

    def spend(self, number: int) -> None:
        """Take as many as were used, be it more than there are: what is missing has to come in before the next one."""
        self.wait()
        self._tokens -= number


class CallerAllowance:
    """The limits of one caller, whichever way its requests come.

    Args:
        name: of the caller, for refusals.
        requests_per_second: on average; 0 for any number.
        concurrency: requests under way at once; 0 for any number.
        tokens_per_minute: of texts that are read and made, on average; 0 for any number.
        clock: gives seconds; trio's unless given.
    """

    __slots__ = ("_bucket", "_concurrency", "_name", "_rate", "_texts", "_tokens_per_minute", "under_way")

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
        self._texts = TokenBucket(per_second, tokens_per_minute, clock) if tokens_per_minute else None
        self._concurrency = concurrency
        self.under_way = 0

    def take(self) -> None:
        """Count one more request.

        Raises:
            CallerLimited: it is one too many; the message says of what, and when to come again.
        """
        if self._concurrency and self.under_way >= self._concurrency:
            raise CallerLimited(f"{self._name!r} has {self.under_way} requests under way, which is all that it may")
        seconds = self._bucket.take() if self._bucket is not None else 0.0
        if seconds:
            text = f"{self._name!r} may make {self._rate:g} requests a second; try again in {seconds:.2g} s"
            raise CallerLimited(text, retry_after_seconds=seconds)
        self.under_way += 1

    def give_back(self) -> None:
        """Count one less under way."""
        self.under_way -= 1

    def check_tokens(self) -> None:
        """Let a request that reads or makes tokens pass, whose number is told by :meth:`spend_tokens` later.

        Raises:
            CallerLimited: those before it have used up what there is; the message says when to come again.
        """
        seconds = self._texts.wait() if self._texts is not None else 0.0
        if seconds:
            text = f"{self._name!r} may use {self._tokens_per_minute} tokens a minute; try again in {seconds:.2g} s"
            raise CallerLimited(text, retry_after_seconds=seconds)

    def spend_tokens(self, number: int) -> None:
        """Count tokens that were read or made."""
        if self._texts is not None:
            self._texts.spend(number)


# ----------------------------------------------------------------------
# How much a caller may ask for of a server that several processes are
# ----------------------------------------------------------------------


class SharedAllowance(CallerAllowance):
    """The limits of one caller, counted by all processes in memory that they share: exact, and nobody is asked.

    Args:
        ledger: where they count.
        entry: of the caller.
    """

    __slots__ = ("_account", "_ledger")

    def __init__(self, ledger: Ledger, entry: CallerEntry) -> None:
        limits = entry.requests_per_second, entry.concurrency, entry.tokens_per_minute
        # Clocks of trio differ from process to process.
        super().__init__(entry.name, *limits, clock=time.monotonic)
        self._ledger = ledger
        # What is counted goes on where everything about a caller stays as it is, in whichever process.
        self._account = ledger.account(f"caller {entry!r}")

    @contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Have within the block what all processes have counted."""
        buckets = [(number, each) for number, each in enumerate((self._bucket, self._texts)) if each is not None]
        with self._ledger.locked():
            elsewhere = self._account.elsewhere().under_way
            self.under_way = self._account.under_way + elsewhere
            for number, each in buckets:
                each.level = self._account.bucket(number)
            try:
                yield
            finally:
                self._account.write(self.under_way - elsewhere)
                for number, each in buckets:
                    self._account.fill(number, each.level)

    def take(self) -> None:
        """Count one more request.

        Raises:
            CallerLimited: it is one too many.
        """
        with self._up_to_date():
            super().take()

    def give_back(self) -> None:
        """Count one less under way."""
        with self._up_to_date():
            super().give_back()

    def check_tokens(self) -> None:
        """Let a request that reads or makes tokens pass.

        Raises:
            CallerLimited: those before it have used up what there is.
        """
        if self._texts is not None:
            with self._up_to_date():
                super().check_tokens()

    def spend_tokens(self, number: int) -> None:
        """Count tokens that were read or made."""
        if self._texts is not None and number:
            with self._up_to_date():
                super().spend_tokens(number)
