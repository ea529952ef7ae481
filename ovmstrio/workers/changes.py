"""The other processes of a server, and the turns in which all of them are changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.core.worker_peers import PartedAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from ovmstrio.workers.aggregate import KeptFigures
    from ovmstrio.workers.rpc import Peers

__all__ = ["TURN", "OtherWorkers"]

TURN: Final = "turn"
"""What is asked of the first process, which gives turns."""
_FIRST: Final = 0

_T = TypeVar("_T")


class OtherWorkers:
    """The other processes, as one of them sees them; see :class:`ovmstrio.core.worker_peers.Siblings`.

    Args:
        peers: asks them.
        figures: what those have counted that have ended.

    Attributes:
        answers: what they may ask that a part of this process has said it answers, by the question.
    """

    def __init__(self, peers: Peers, figures: KeptFigures) -> None:
        self.row = peers.row
        self.others: Sequence[int] = [row for row in range(peers.rows) if row != peers.row]
        self.answers: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._peers = peers
        self._figures = figures
        self._turns = trio.Semaphore(1)

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Ask some of them, and give what comes in time; as ``Siblings.ask_soon``."""
        return await self._peers.ask_soon(questions, seconds)

    def answer_with(self, question: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Have a question be answered; as ``Siblings.answer_with``."""
        self.answers[question] = answer

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Ask all of them that can be reached; as ``Siblings.ask_all``."""
        return await self._peers.ask_all(question, *arguments, limit_seconds=limit_seconds)

    def leave_figures(self, text: bytes, *, is_open: bool) -> None:
        """Have metrics be among those of the past when this process ends; as ``Siblings.leave_figures``."""
        self._figures.leave(self._peers.row, text, is_open=is_open)

    def past_changes(self, *, is_open: bool) -> int | None:
        """Count how often figures have become those of the past; as ``Siblings.past_changes``."""
        return self._figures.changes(is_open=is_open)

    def past_figures(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Give what processes have counted that have ended; as ``Siblings.past_figures``."""
        known = {self._peers.row, *answered}
        return self._figures.past([row for row in range(self._peers.rows) if row not in known], is_open=is_open)

    async def in_turn(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what no other process does meanwhile; as ``Siblings.in_turn``."""
        if self._peers.row == _FIRST:
            async with self._turns:
                return await work()
        done: list[_T] = []
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(self._take_turn)
            try:
                done.append(await work())
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery, which would make a group of it
                errors.append(error)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return done[0]

    async def _take_turn(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Have the turn until cancelled; without the first process, which is being started then, nobody keeps turns.

        Cancellation: at once.
        """
        has_turn = trio.Event()

        def begin(_: Any) -> None:
            if not has_turn.is_set():
                has_turn.set()
                task_status.started()

        try:
            await self._peers.listen(_FIRST, [TURN], begin)
        except NotReady:
            begin(None)
        await trio.sleep_forever()

    def give_turn(self) -> PartedAnswer:
        """Let another process have the turn, when it comes, until it hears no more."""
        return _Turn(self._turns)


class _Turn(PartedAnswer):
    """A turn, which is told of by a part, and of whose end the other process tells by its leaving."""

    def __init__(self, turns: trio.Semaphore) -> None:
        self._turns = turns
        self._is_given = False

    async def __anext__(self) -> Any:
        if self._is_given:
            await trio.sleep_forever()
        await self._turns.acquire()
        self._is_given = True
        return None

    def close(self) -> None:
        """Let the next one have it."""
        if self._is_given:
            self._turns.release()
