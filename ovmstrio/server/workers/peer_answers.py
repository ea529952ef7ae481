"""What a process answers others of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.dataplane.whole_changes import CHANGES, make_change
from ovmstrio.dataplane.whole_server import answer_sibling
from ovmstrio.server.reloading import RELOAD, RESTORE
from ovmstrio.server.workers.engines import ASK_ENGINE, HEAR_ENGINE
from ovmstrio.server.workers.peers import LEFT
from ovmstrio.server.workers.steps import STEP, SWIFT_STEP, answer_step, answer_swift_step
from ovmstrio.server.workers.turns import TURN

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.server.hosting import Hosting
    from ovmstrio.server.reloading import Reloading

__all__ = ["PeerAnswers"]


class PeerAnswers:
    """Answers what other processes ask.

    Args:
        hosting: how this process takes part.
        plane: what it serves.
        reloading: its reloads.
    """

    def __init__(self, hosting: Hosting, plane: DataPlane, reloading: Reloading) -> None:
        self._hosting = hosting
        self._plane = plane
        self._reloading = reloading

    async def answer(self, asked: Any) -> Any:
        """Answer a question.

        Raises:
            ServerError: what was asked for has failed.

        Cancellation: as what was asked for.
        """
        question, *arguments = asked
        if question == SWIFT_STEP:
            return await answer_swift_step(self._plane.registry, arguments)
        if question == STEP:
            return await answer_step(self._plane.registry, arguments)
        if question in {ASK_ENGINE, HEAR_ENGINE} and self._hosting.engines is not None:
            return await self._hosting.engines.answer(question, arguments)
        if question in CHANGES:
            return await make_change(self._plane, question, arguments)
        return await self._answer_rarely(question, arguments)

    async def _answer_rarely(self, question: str, arguments: list[Any]) -> Any:
        if question == LEFT and self._hosting.peers is not None:
            return self._hosting.peers.note_left(*arguments)
        if question == TURN and self._hosting.siblings is not None:
            return self._hosting.siblings.give_turn()
        if self._hosting.siblings is not None and question in self._hosting.siblings.answers:
            return await self._hosting.siblings.answers[question](*arguments)
        if question == RELOAD:
            return await self._reloading.reload_here()
        if question == RESTORE:
            return await self._reloading.restore_here()
        return await answer_sibling(self._plane, question, arguments)
