"""RPC to the other workers, and the server-wide lock for admin changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.core.worker_peers import StreamedResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from ovmstrio.workers.retained_metrics import RetainedMetrics
    from ovmstrio.workers.rpc import WorkerRpc

CHANGE_LOCK: Final = "turn"
"""RPC of the first worker, which owns the lock."""
_LOCK_OWNER: Final = 0

_T = TypeVar("_T")


class PeerFacade:
    """RPC to the other workers; see :class:`ovmstrio.core.worker_peers.WorkerPeers`.

    Attributes:
        answers: registered RPC handlers by name.
    """

    def __init__(self, peers: WorkerRpc, figures: RetainedMetrics) -> None:
        self.row = peers.row
        self.others: Sequence[int] = [row for row in range(peers.rows) if row != peers.row]
        self.answers: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._peers = peers
        self._figures = figures
        self._lock = trio.Semaphore(1)

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Call several workers; as ``Siblings.ask_soon``."""
        return await self._peers.ask_soon(questions, seconds)

    def answer_with(self, question: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Register an RPC handler; as ``Siblings.answer_with``."""
        self.answers[question] = answer

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Call all reachable workers; as ``Siblings.ask_all``."""
        return await self._peers.ask_all(question, *arguments, limit_seconds=limit_seconds)

    def leave_figures(self, text: bytes, *, is_open: bool) -> None:
        """Save metrics of this worker; as ``Siblings.leave_figures``."""
        self._figures.leave(self._peers.row, text, is_open=is_open)

    def past_changes(self, *, is_open: bool) -> int | None:
        """Return the generation of the retained metrics; as ``Siblings.past_changes``."""
        return self._figures.changes(is_open=is_open)

    def past_figures(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Return metrics of exited workers; as ``Siblings.past_figures``."""
        known = {self._peers.row, *answered}
        return self._figures.past([row for row in range(self._peers.rows) if row not in known], is_open=is_open)

    async def in_turn(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run ``work`` under the server-wide lock; as ``Siblings.in_turn``."""
        if self._peers.row == _LOCK_OWNER:
            async with self._lock:
                return await work()
        done: list[_T] = []
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(self._hold_lock)
            try:
                done.append(await work())
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery's exception group
                errors.append(error)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return done[0]

    async def _hold_lock(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold the lock until cancelled; without the first worker, which is restarting then, there is no lock."""
        has_turn = trio.Event()

        def begin(_: Any) -> None:
            if not has_turn.is_set():
                has_turn.set()
                task_status.started()

        try:
            await self._peers.listen(_LOCK_OWNER, [CHANGE_LOCK], begin)
        except NotReady:
            begin(None)
        await trio.sleep_forever()

    def lock_stream(self) -> StreamedResult:
        """Return a stream that holds the lock for another worker until it is closed."""
        return _LockStream(self._lock)


class _LockStream(StreamedResult):
    """Lock stream: one part when the lock is acquired; closing releases it."""

    def __init__(self, turns: trio.Semaphore) -> None:
        self._lock = turns
        self._is_acquired = False

    async def __anext__(self) -> Any:
        if self._is_acquired:
            await trio.sleep_forever()
        await self._lock.acquire()
        self._is_acquired = True
        return None

    def close(self) -> None:
        if self._is_acquired:
            self._lock.release()
