"""Dispatch of RPCs between workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.server.reload import RELOAD, RESTORE
from ovmstrio.serving.aggregate import answer_peer
from ovmstrio.serving.broadcast_changes import PEER_REQUESTS, handle_peer_change
from ovmstrio.workers.peer_facade import CHANGE_LOCK
from ovmstrio.workers.rpc import FAREWELL
from ovmstrio.workers.sequence_forwarding import PACKED_STEP, STEP, run_packed_step, run_plain_step
from ovmstrio.workers.shared_engines import CALL_ENGINE, LISTEN_ENGINE

if TYPE_CHECKING:
    from ovmstrio.server.reload import Reloader
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.workers.peer_facade import PeerFacade
    from ovmstrio.workers.rpc import WorkerRpc
    from ovmstrio.workers.shared_engines import WorkerEngines


class RpcHandlers:
    """RPC handlers of a worker."""

    def __init__(
        self, peers: WorkerRpc, engines: WorkerEngines, others: PeerFacade, plane: DataPlane, reloading: Reloader
    ) -> None:
        self._peers = peers
        self._engines = engines
        self._others = others
        self._plane = plane
        self._reloading = reloading

    async def answer(self, call: Any) -> Any:
        """Handle an RPC; raises ServerError as the called function."""
        question, *arguments = call
        if question == PACKED_STEP:
            return await run_packed_step(self._plane.registry, arguments)
        if question == STEP:
            return await run_plain_step(self._plane.registry, arguments)
        if question in {CALL_ENGINE, LISTEN_ENGINE}:
            return await self._engines.answer(question, arguments)
        if question in PEER_REQUESTS:
            return await handle_peer_change(self._plane, question, arguments)
        return await self._answer_rare(question, arguments)

    async def _answer_rare(self, question: str, arguments: list[Any]) -> Any:
        if question == FAREWELL:
            return self._peers.record_farewell(*arguments)
        if question == CHANGE_LOCK:
            return self._others.lock_stream()
        if question in self._others.answers:
            return await self._others.answers[question](*arguments)
        if question == RELOAD:
            return await self._reloading.reload_here()
        if question == RESTORE:
            return await self._reloading.rollback_here()
        return await answer_peer(self._plane, question, arguments)
