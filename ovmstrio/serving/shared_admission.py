"""Admission to a server of several processes: places and queues are counted over all of them.

Each process has a queue of its own.  One that gives a place back rings those in which calls wait, and leaves the place
to them for a moment where one of theirs came before its own.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.core.worker_peers import NOTHING_ELSEWHERE
from ovmstrio.serving.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.core.worker_peers import Account, Ledger
    from ovmstrio.serving.admission import Turnstile, Waiter

__all__ = ["SharedAdmission"]

_MOMENT_SECONDS: Final = 0.01


class SharedAdmission(Admission):
    """The places of one server and of its services, as one of several processes gives them.

    Args:
        ledger: where all of them count.
        server: the limit of all calls together.
        limit_of: gives that of a service, as it is configured now.
    """

    def __init__(
        self, ledger: Ledger, server: Limit = NO_LIMIT, limit_of: Callable[[str], Limit] = lambda _: NO_LIMIT
    ) -> None:
        super().__init__(server, limit_of)
        self._ledger = ledger
        self._accounts: dict[str, Account] = {}
        self._left_to_others = trio.Event()

    async def follow_others(self) -> None:
        """Let calls go on when other processes have given places back.

        Cancellation: at once.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._come_back)
            while True:
                await self._ledger.rung()
                self._let_in()

    async def _come_back(self) -> None:
        """Take what was left to others and not taken by them."""
        while True:
            await self._left_to_others.wait()
            self._left_to_others = trio.Event()
            await trio.sleep(_MOMENT_SECONDS)
            self._let_in()

    @contextmanager
    def _counted(self, *gates: Turnstile) -> Iterator[None]:
        """Have within the block what all processes have counted, and tell them what has changed; nothing waits."""
        accounts = [(gate, self._account(gate)) for gate in gates]
        if all(account is None for _, account in accounts):
            yield
            return
        with self._ledger.locked():
            for gate, account in accounts:
                gate.elsewhere = NOTHING_ELSEWHERE if account is None else account.elsewhere()
            try:
                yield
            finally:
                for gate, account in accounts:
                    if account is not None:
                        queued = self._queued if gate is self._server else gate.queued
                        account.write(gate.under_way, queued, self._since(gate))

    def _account(self, gate: Turnstile) -> Account | None:
        key = f"service {gate.name}" if gate.name else "server"
        known = self._accounts.get(key)
        if known is None and gate.limit.max_concurrency:
            known = self._accounts[key] = self._ledger.account(key)
        return known

    def _since(self, gate: Turnstile) -> float:
        """Tell since when the first of those waits here that wait for a place of a service, or of the server."""
        queues = [each.direct for each in self._busy.values()] if gate is self._server else [gate.direct, gate.nested]
        return min((next(iter(queue)).since for queue in queues if queue), default=math.inf)

    def _grant_or_queue(self, gate: Turnstile, *, is_nested: bool) -> Waiter | None:
        with self._counted(gate, self._server):
            return super()._grant_or_queue(gate, is_nested=is_nested)

    def _withdraw(self, gate: Turnstile, waiter: Waiter, *, is_nested: bool) -> None:
        with self._counted(gate, self._server):
            self._remove(gate, waiter, is_nested=is_nested)
        self._offer(gate)

    def leave(self, gate: Turnstile, *, is_nested: bool, seconds: float | None = None) -> None:
        """Take a place back that was held for so long, and let in who waits for it, here or elsewhere."""
        with self._counted(gate, self._server):
            self._take_back(gate, is_nested=is_nested, seconds=seconds)
        self._offer(gate)

    def _offer(self, gate: Turnstile) -> None:
        """Have those go on that wait for a place, those first that came first."""
        theirs = (gate.elsewhere, self._server.elsewhere)
        rows = tuple({row for each in theirs for row in each.rows})
        if rows:
            self._ledger.ring(rows)
        if not self._busy:
            return
        if rows and min(each.since for each in theirs) < min(self._since(each) for each in self._busy.values()):
            self._left_to_others.set()
        else:
            self._let_in()

    def _let_in(self) -> None:
        if self._busy:
            with self._counted(*self._busy.values(), self._server):
                super()._let_in()
