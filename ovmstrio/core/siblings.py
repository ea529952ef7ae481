"""The other processes of a server that several are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["Siblings"]

_T = TypeVar("_T")


class Siblings(Protocol):
    """The other processes of a server.

    Attributes:
        row: the number of the process that asks.
        others: those of the others.
    """

    row: int
    others: Sequence[int]

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Ask some of them, and give the answers that come in so many seconds, by their numbers.

        Of those that are missing one is being started, is stuck, or has failed, which is in its log.

        Args:
            questions: what each of them is asked, its name first.
            seconds: how long they are waited for.

        Cancellation: at once, and of their work.
        """
        ...

    def answer_with(self, question: str, answer: Callable[..., Awaitable[Any]]) -> None:
        """Have a question of theirs be answered by a function of its arguments, with plain data."""
        ...

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Ask all of them that can be reached, and give their answers, which are plain data.

        Raises:
            ServerError: what one of them raised, or did not answer in time; the message tells which one.

        Cancellation: at once.
        """
        ...

    def leave_figures(self, text: bytes, *, is_open: bool) -> None:
        """Have metrics that were told be among those of the past when this process ends; in one of two formats."""
        ...

    def past_changes(self, *, is_open: bool) -> int | None:
        """Count how often a process has ended whose figures are of the past now; None while they become so."""
        ...

    def past_figures(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        """Give what processes have counted that have ended, which none of those has that have answered."""
        ...

    async def in_turn(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what changes all processes, while no other process does such a thing.

        Raises:
            Exception: what ``work`` raises.

        Cancellation: while it is waited for, and as ``work``.
        """
        ...
