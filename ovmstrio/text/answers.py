"""What an engine has made for one request, joined while nobody takes it: slow readers hold no more than that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.errors import DeadlineExceeded
from ovmstrio.core.generation import Finish, TokenLogprob
from ovmstrio.inference.engine.messages import FINISHES

if TYPE_CHECKING:
    from ovmstrio.core.errors import ServerError

__all__ = ["Made", "TextAnswer"]


@dataclass(slots=True)
class Made:
    """What has come of text ``index`` since somebody looked: parts with how many tokens were made for each."""

    index: int
    parts: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.parts)


class TextAnswer:
    """The texts of one request, filled by the reader of the engine's frames and emptied by one task.

    Args:
        number: the engine's number for the request.
        texts: how many there are.
        deadline: on trio's clock; nothing is waited for beyond it.

    Attributes:
        is_over: whether nothing more will come.
        tokens: how many have come.
        began: when it was asked for, on trio's clock.
        finish: why the text ended that ended last.
        last_came: when something has come last, by the text, on trio's clock.
    """

    def __init__(self, number: int, texts: int, deadline: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self.tokens = 0
        self.finish: Finish | None = None
        self.began = trio.current_time()
        self.last_came: dict[int, float] = {}
        self._left = texts
        self._deadline = deadline
        self._made: dict[int, Made] = {}
        self._error: ServerError | None = None
        self._news: trio.Event | None = None

    def put(self, index: int, text: str, tokens: int, logprobs: list[list[Any]] | None, finish: int | None) -> None:
        """Take a row of a frame; never waits."""
        made = self._made.get(index)
        if made is None:
            made = self._made[index] = Made(index)
        made.parts.append((text, tokens))
        made.tokens += tokens
        self.tokens += tokens
        if logprobs:
            made.logprobs += [TokenLogprob(*each) for each in logprobs]
        if finish is not None:
            made.finish = self.finish = FINISHES[finish]
            self._left -= 1
            self.is_over = not self._left
        self._wake()

    def fail(self, error: ServerError) -> None:
        """Note that nothing more will come, because of an error; what has come before is still there."""
        if not self.is_over:
            self.is_over = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    async def take(self) -> Made | None:
        """Give what has come of one text, waiting for it; None after the end of all.

        Raises:
            ServerError: the request failed.
            DeadlineExceeded: nothing has come until the deadline.

        Cancellation: while there is nothing.
        """
        if not self._made and not self.is_over:
            await self._wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._made:
            return self._made.pop(next(iter(self._made)))
        if self._error is not None:
            raise self._error
        return None

    async def _wait(self) -> None:
        if self._deadline == math.inf:
            await self._hear()
            return
        with trio.CancelScope(deadline=self._deadline) as scope:
            await self._hear()
        if scope.cancelled_caught:
            raise DeadlineExceeded("the deadline of the request passed before the text was complete")

    async def _hear(self) -> None:
        while not self._made and not self.is_over:
            self._news = trio.Event()
            await self._news.wait()
