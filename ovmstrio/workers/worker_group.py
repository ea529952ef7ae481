"""RPC between worker processes: dispatch of peer calls, calls to all peers, and the lock for admin changes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.errors import NotReady, WorkerRestarting
from ovmstrio.core.worker_peers import StreamedResult
from ovmstrio.server.reload import RELOAD, RESTORE
from ovmstrio.serving.aggregate import answer_peer
from ovmstrio.serving.broadcast_changes import PEER_REQUESTS, handle_peer_change
from ovmstrio.workers.owners import CALL_ENGINE, LISTEN_ENGINE
from ovmstrio.workers.rpc import PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ovmstrio.server.reload import Reloader
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.workers.owners import WorkerEngines
    from ovmstrio.workers.rpc import WorkerRpc
    from ovmstrio.workers.shared_state import RetainedMetrics

_CHANGE_LOCK: Final = "change lock"
"""RPC of the first worker, which owns the lock."""
_DRAINED: Final = "drained"
"""RPC that reports a drained worker."""
_LOCK_OWNER: Final = 0

_T = TypeVar("_T")


class WorkerGroup:
    """RPC to the other workers; see :class:`ovmstrio.core.worker_peers.WorkerPeers`."""

    def __init__(self, rpc: WorkerRpc, engines: WorkerEngines, metrics: RetainedMetrics) -> None:
        self.row = rpc.row
        self.others: Sequence[int] = [row for row in range(rpc.rows) if row != rpc.row]
        self._rpc = rpc
        self._engines = engines
        self._metrics = metrics
        self._lock = trio.Semaphore(1)
        self._drained_peers: set[int] = set()
        self._handlers: dict[str, Callable[..., Awaitable[Any]]] = {}

    async def run(self, plane: DataPlane, reloading: Reloader, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve RPC calls of the peers until cancelled."""

        async def answer(call: Sequence[Any]) -> Any:
            method, *arguments = call
            if method in {CALL_ENGINE, LISTEN_ENGINE}:
                return await self._engines.answer(method, arguments)
            if method in self._handlers:
                return await self._handlers[method](*arguments)
            if method in PEER_REQUESTS:
                return await handle_peer_change(plane, method, arguments)
            if method == _DRAINED:
                self._drained_peers.update(arguments)
                return self._rpc.announce()
            if method == _CHANGE_LOCK:
                return _LockStream(self._lock)
            return await answer_peer(plane, method, arguments)

        self._handlers |= {RELOAD: reloading.reload_for_peer, RESTORE: reloading.rollback_here}
        await self._rpc.run(answer, task_status=task_status)

    async def call(self, row: int, method: str, *arguments: Any) -> Any:
        """Call one worker; raise the exception of its handler."""
        try:
            return await self._rpc.call(row, [method, *arguments])
        except PeerUnreachable as error:
            raise WorkerRestarting(error.message) from None

    async def call_within(self, calls: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Call several workers and return the results that arrive in time."""
        return await self._rpc.call_within(calls, seconds)

    async def call_all(self, method: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Call all reachable workers; raises ServerError if one fails."""
        return await self._rpc.call_all(method, *arguments, limit_seconds=limit_seconds)

    def register_handler(self, method: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Register an RPC handler."""
        self._handlers[method] = answer

    def save_metrics(self, text: bytes, *, is_open: bool) -> None:
        """Save metrics of this worker."""
        self._metrics.save(self.row, text, is_open=is_open)

    def metrics_generation(self, *, is_open: bool) -> int | None:
        """Return the generation of the retained metrics; None while they are updated."""
        return self._metrics.generation(is_open=is_open)

    def retained_metrics(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Return metrics of exited workers that are not among ``answered``."""
        known = {self.row, *answered}
        return self._metrics.texts([row for row in range(self._rpc.rows) if row not in known], is_open=is_open)

    async def wait_peers_drained(self, others: AbstractSet[int]) -> None:
        """Report this worker as drained, and wait until all ``others`` are drained."""
        # The RPC client logs a failure; the peer then waits for its timeout.
        with suppress(Exception):
            await self._rpc.call_all(_DRAINED, self.row)
        while not self._drained_peers.issuperset(others):
            await self._rpc.wait_change()

    async def run_locked(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run ``work`` under the server-wide lock; raises as ``work``."""
        if self.row == _LOCK_OWNER:
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
        """Hold the lock until cancelled; if the lock owner is restarting, no lock is taken."""
        has_turn = trio.Event()

        def begin(_: Any) -> None:
            if not has_turn.is_set():
                has_turn.set()
                task_status.started()

        try:
            await self._rpc.listen(_LOCK_OWNER, [_CHANGE_LOCK], begin)
        except NotReady:
            begin(None)
        await trio.sleep_forever()


class _LockStream(StreamedResult):
    """Lock stream: one part when the lock is acquired; closing releases it."""

    def __init__(self, lock: trio.Semaphore) -> None:
        self._lock = lock
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
