"""Output buffer of one request: joins engine output until the reader takes it, which bounds its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.errors import DeadlineExceeded
from ovmstrio.core.generation import Finish, TokenLogprob
from ovmstrio.inference.engine.messages import FINISH_REASONS

if TYPE_CHECKING:
    from ovmstrio.core.errors import ServerError


@dataclass(slots=True)
class OutputChunk:
    """Unread output of text ``index``; ``parts`` are texts with their numbers of tokens."""

    index: int
    parts: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """The joined parts."""
        return "".join(text for text, _ in self.parts)


class OutputBuffer:
    """The texts of one request, filled by the engine's message reader and read by one task.

    Args:
        number: request id.
        texts: number of texts.
        deadline: trio time.

    Attributes:
        is_over: whether no more output will come.
        tokens: number of tokens received.
        began: trio time of the request.
        finish: finish reason of the text that ended last.
        last_came: trio time of the last output, by text.
    """

    def __init__(self, number: int, texts: int, deadline: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self.tokens = 0
        self.finish: Finish | None = None
        self.began = trio.current_time()
        self.last_output_at: dict[int, float] = {}
        self._open_texts = texts
        self._deadline = deadline
        self._unread: dict[int, OutputChunk] = {}
        self._error: ServerError | None = None
        self._changed: trio.Event | None = None

    def put(self, index: int, text: str, tokens: int, logprobs: list[list[Any]] | None, finish: int | None) -> None:
        """Append a row of a step's output; never blocks."""
        made = self._unread.get(index)
        if made is None:
            made = self._unread[index] = OutputChunk(index)
        made.parts.append((text, tokens))
        made.tokens += tokens
        self.tokens += tokens
        if logprobs:
            made.logprobs += [TokenLogprob(*each) for each in logprobs]
        if finish is not None:
            made.finish = self.finish = FINISH_REASONS[finish]
            self._open_texts -= 1
            self.is_over = not self._open_texts
        self._wake()

    def fail(self, error: ServerError) -> None:
        """End the request with an error; earlier output stays readable."""
        if not self.is_over:
            self.is_over = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def take(self) -> OutputChunk | None:
        """Return the unread output of one text, waiting for it; None after the end of all texts.

        Raises:
            ServerError: the request failed.
            DeadlineExceeded: the deadline has passed.
        """
        if not self._unread and not self.is_over:
            await self._wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._unread:
            return self._unread.pop(next(iter(self._unread)))
        if self._error is not None:
            raise self._error
        return None

    async def _wait(self) -> None:
        if self._deadline == math.inf:
            await self._wait_output()
            return
        with trio.CancelScope(deadline=self._deadline) as scope:
            await self._wait_output()
        if scope.cancelled_caught:
            raise DeadlineExceeded("the deadline passed before the text was complete")

    async def _wait_output(self) -> None:
        while not self._unread and not self.is_over:
            self._changed = trio.Event()
            await self._changed.wait()
