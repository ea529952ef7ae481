"""Calls of code that cannot be stopped, in threads that are left to end by themselves when nobody waits any more.

These are the only threads of custom nodes that may outlive the task that started them.  They are bounded: each has a
token of its node's limiter until it ends, and when all tokens are theirs, further calls are refused and not queued.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import structlog
import trio

from ovmstrio.core.errors import Overloaded

__all__ = ["AbandonableThreads"]

_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class _Call:
    """One call; the event loop and the thread each write down what they did before they look at what the other did."""

    __slots__ = ("_leftovers", "has_begun", "has_ended", "is_abandoned")

    def __init__(self) -> None:
        self.has_begun = False
        self.has_ended = False
        self.is_abandoned = False
        self._leftovers: list[Callable[[], object]] = []

    def leave(self, discard: Callable[[], object]) -> None:
        """Leave what the call gave for the caller, who may be gone; in the thread."""
        self._leftovers.append(discard)
        if self.is_abandoned:
            self.discard()

    def discard(self) -> None:
        """Discard what the call gave, if it has given anything and the other side has not discarded it."""
        try:
            discard = self._leftovers.pop()
        except IndexError:
            return
        discard()


class AbandonableThreads:
    """Threads for the calls of one node.

    Args:
        name: of the node, for messages.
        limiter: bounds how many there are at once.
    """

    def __init__(self, name: str, limiter: trio.CapacityLimiter) -> None:
        self._name = name
        self._limiter = limiter
        self._abandoned: set[_Call] = set()
        self._on_end: Callable[[], object] | None = None

    @property
    def abandoned(self) -> int:
        """How many threads go on although their callers have left."""
        return len(self._abandoned)

    async def call(self, fn: Callable[[], _T], discard: Callable[[_T], object]) -> _T:
        """Call ``fn`` in a thread and give what it returns.

        Raises:
            Overloaded: as many threads as there may be are busy with calls whose callers have left.
            Exception: whatever ``fn`` raises.

        Ownership: the thread, until it ends or the caller leaves.

        Cancellation: at once.  A call that has begun goes on; what it returns is given to ``discard`` in its thread.
        """
        if self.abandoned >= self._limiter.total_tokens:
            raise Overloaded(
                f"all {self.abandoned} threads of {self._name} are busy with calls whose callers have left"
            )
        call = _Call()
        try:
            return await trio.to_thread.run_sync(
                self._run, call, fn, discard, abandon_on_cancel=True, limiter=self._limiter
            )
        except trio.Cancelled:
            self._abandon(call)
            raise

    async def wait_for_abandoned(self) -> None:
        """Wait until every call has ended whose caller has left; to be called by one task, when no call is awaited.

        Cancellation: at once.
        """
        loop = trio.lowlevel.current_trio_token()
        while True:
            has_ended = trio.Event()
            self._on_end = partial(loop.run_sync_soon, has_ended.set)
            if not self._abandoned:
                return
            await has_ended.wait()

    def _abandon(self, call: _Call) -> None:
        call.is_abandoned = True
        if call.has_begun:
            self._abandoned.add(call)
            log.info("custom node goes on although its caller has left", node=self._name, abandoned=self.abandoned)
        call.discard()
        if call.has_ended:
            self._abandoned.discard(call)

    def _run(self, call: _Call, fn: Callable[[], _T], discard: Callable[[_T], object]) -> _T:
        call.has_begun = True
        try:
            if call.is_abandoned:
                raise RuntimeError("nobody waits for this call any more")
            value = fn()
            call.leave(partial(discard, value))
            return value
        finally:
            call.has_ended = True
            self._abandoned.discard(call)
            if self._on_end is not None:
                self._on_end()
