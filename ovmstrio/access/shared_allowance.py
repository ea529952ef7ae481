"""How much a caller may ask for of a server that several processes are."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ovmstrio.access.allowance import CallerAllowance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.access.key_file import CallerEntry
    from ovmstrio.core.shared_counts import Ledger

__all__ = ["SharedAllowance"]


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
