"""Dispatch of RPCs between workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.server.reloading import RELOAD, RESTORE
from ovmstrio.serving.aggregate import answer_sibling
from ovmstrio.serving.broadcast_changes import CHANGES, make_change
from ovmstrio.workers.changes import TURN
from ovmstrio.workers.engines import ASK_ENGINE, HEAR_ENGINE
from ovmstrio.workers.rpc import LEFT
from ovmstrio.workers.sequences import STEP, SWIFT_STEP, answer_step, answer_swift_step

if TYPE_CHECKING:
    from ovmstrio.server.reloading import Reloading
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.workers.changes import OtherWorkers
    from ovmstrio.workers.engines import WorkerEngines
    from ovmstrio.workers.rpc import Peers

__all__ = ["PeerAnswers"]


class PeerAnswers:
    """RPC handlers of a worker."""

    def __init__(
        self, peers: Peers, engines: WorkerEngines, others: OtherWorkers, plane: DataPlane, reloading: Reloading
    ) -> None:
        self._peers = peers
        self._engines = engines
        self._others = others
        self._plane = plane
        self._reloading = reloading

    async def answer(self, call: Any) -> Any:
        """Handle an RPC; raises ServerError as the called function."""
        question, *arguments = call
        if question == SWIFT_STEP:
            return await answer_swift_step(self._plane.registry, arguments)
        if question == STEP:
            return await answer_step(self._plane.registry, arguments)
        if question in {ASK_ENGINE, HEAR_ENGINE}:
            return await self._engines.answer(question, arguments)
        if question in CHANGES:
            return await make_change(self._plane, question, arguments)
        return await self._answer_rare(question, arguments)

    async def _answer_rare(self, question: str, arguments: list[Any]) -> Any:
        if question == LEFT:
            return self._peers.note_left(*arguments)
        if question == TURN:
            return self._others.give_turn()
        if question in self._others.answers:
            return await self._others.answers[question](*arguments)
        if question == RELOAD:
            return await self._reloading.reload_here()
        if question == RESTORE:
            return await self._reloading.restore_here()
        return await answer_sibling(self._plane, question, arguments)
