"""What the processes of one server count together, as those see it that count.

::

    locked ──> elsewhere: what the others have written ──> decide ──> write: what this process has
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

__all__ = ["NOTHING_ELSEWHERE", "Account", "Bucket", "Elsewhere", "Ledger"]


class Elsewhere(NamedTuple):
    """What other processes have: calls under way, calls that wait, and since when the first of these does.

    ``rows`` are the processes in which calls wait; ``since`` is a time of ``time.monotonic``.
    """

    under_way: int = 0
    waiting: int = 0
    since: float = math.inf
    rows: tuple[int, ...] = ()


NOTHING_ELSEWHERE: Final = Elsewhere()


class Bucket(NamedTuple):
    """What is left in a bucket of tokens, and when that was counted, on ``time.monotonic``; 0 for never."""

    tokens: float = 0.0
    filled_at: float = 0.0


class Account(Protocol):
    """What is counted under one name.  Whoever reads and writes holds the ledger's lock."""

    @property
    def under_way(self) -> int:
        """What this process has written."""
        ...

    def elsewhere(self) -> Elsewhere:
        """Tell what other processes have."""
        ...

    def write(self, under_way: int, waiting: int = 0, since: float = math.inf) -> None:
        """Tell others what this process has; it is forgotten when the process ends."""
        ...

    def bucket(self, number: int) -> Bucket:
        """Read one of two buckets, which belong to all processes and outlive them."""
        ...

    def fill(self, number: int, bucket: Bucket) -> None:
        """Write one of two buckets."""
        ...


class Ledger(Protocol):
    """All that is counted."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from reading and writing; nothing may wait within."""
        ...

    def account(self, name: str) -> Account:
        """Give what is counted under a name, the same in all processes.

        Raises:
            NotSupported: there are more names than the ledger has room for.
        """
        ...

    def ring(self, rows: tuple[int, ...]) -> None:
        """Have other processes look whether calls that wait there can go on; costs a system call each."""
        ...

    async def rung(self) -> None:
        """Wait until another process says that there may be room.

        Cancellation: at once.
        """
        ...
