"""What the processes of one server count together: requests under way, those that wait, and buckets of tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ovmstrio.core.limits import refuse_more
from ovmstrio.core.shared_counts import Bucket, Elsewhere
from ovmstrio.server.workers.ledger_memory import SINCE, UNDER_WAY, WAITING, key_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ovmstrio.server.workers.bells import Bells
    from ovmstrio.server.workers.board import Board
    from ovmstrio.server.workers.ledger_memory import LedgerMemory

__all__ = ["LedgerLimit", "SharedLedger"]


class SharedAccount:
    """What is counted under one name, as one process sees it; see :class:`ovmstrio.core.shared_counts.Account`.

    Args:
        memory: where it is.
        key: what stands for the name.
        row: this process's.

    Raises:
        NotSupported: there is no room for it; also where what was not used for long is to be used again.
    """

    def __init__(self, memory: LedgerMemory, key: int, row: int) -> None:
        self._memory = memory
        self._key = key
        self._row = row
        self._find()

    def _find(self) -> None:
        memory = self._memory
        self._place = place = memory.find(self._key)
        self._own = memory.row_at(place, self._row)
        self._others = tuple((each, memory.row_at(place, each)) for each in range(memory.rows) if each != self._row)

    @property
    def under_way(self) -> int:
        """What this process has written."""
        if self._memory.whole[self._place] != self._key:
            self._find()
        return self._memory.whole[self._own + UNDER_WAY]

    def elsewhere(self) -> Elsewhere:
        """Tell what other processes have."""
        whole = self._memory.whole
        if whole[self._place] != self._key:
            self._find()
        under_way = waiting = 0
        since = math.inf
        rows: tuple[int, ...] = ()
        for row, at in self._others:
            under_way += whole[at + UNDER_WAY]
            if count := whole[at + WAITING]:
                waiting += count
                rows = (*rows, row)
                since = min(since, self._memory.broken[at + SINCE])
        return Elsewhere(under_way, waiting, since, rows)

    def write(self, under_way: int, waiting: int = 0, since: float = math.inf) -> None:
        """Tell others what this process has."""
        whole, at = self._memory.whole, self._own
        whole[at + UNDER_WAY] = under_way
        whole[at + WAITING] = waiting
        self._memory.broken[at + SINCE] = since

    def bucket(self, number: int) -> Bucket:
        """Read a bucket."""
        at = self._place + 1 + 2 * number
        return Bucket(self._memory.broken[at], self._memory.broken[at + 1])

    def fill(self, number: int, bucket: Bucket) -> None:
        """Write a bucket."""
        at = self._place + 1 + 2 * number
        self._memory.broken[at], self._memory.broken[at + 1] = bucket


class SharedLedger:
    """The accounts of a server, as one of its processes sees them; see :class:`ovmstrio.core.shared_counts.Ledger`.

    Args:
        board: has their memory, and its lock.
        row: this process's.
        bells: by which processes wake each other.
    """

    def __init__(self, board: Board, row: int, bells: Bells) -> None:
        self._board = board
        self._row = row
        self._bells = bells
        self._accounts: dict[str, SharedAccount] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from reading and writing."""
        return self._board.locked()

    def account(self, name: str) -> SharedAccount:
        """Give what is counted under a name.

        Raises:
            NotSupported: there is no room for it.
        """
        known = self._accounts.get(name)
        if known is None:
            with self._board.locked():
                known = self._accounts[name] = SharedAccount(self._board.ledger, key_of(name), self._row)
        return known

    def ring(self, rows: tuple[int, ...]) -> None:
        """Have other processes look."""
        self._bells.ring(rows)

    async def rung(self) -> None:
        """Wait until another process has rung.

        Cancellation: at once.
        """
        await self._bells.rung()


class LedgerLimit:
    """The limit of one service of many, over all processes; see :class:`ovmstrio.core.limits.ConcurrencyLimit`.

    Args:
        ledger: counts.
        name: of the service.
        maximum: how many requests all processes may have in flight.
    """

    def __init__(self, ledger: SharedLedger, name: str, maximum: int) -> None:
        self._ledger = ledger
        self._account = ledger.account(f"project {name}")
        self.maximum = maximum

    def take(self) -> None:
        """Count one more.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        with self._ledger.locked():
            if self._account.under_way + self._account.elsewhere().under_way >= self.maximum:
                raise refuse_more(self.maximum)
            self._account.write(self._account.under_way + 1)

    def give_back(self) -> None:
        """Count one less."""
        with self._ledger.locked():
            self._account.write(self._account.under_way - 1)
