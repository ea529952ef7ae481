"""Recordings that a process writes down, window by window; all that are open take turns."""

from __future__ import annotations

import itertools
import math
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import ModelFailure, Overloaded, ServerError
from ovmstrio.core.speech import SpokenSpan, TranscriptPart
from ovmstrio.openvino.engine.frames import HEARD, REFUSED, decode_failure
from ovmstrio.work.processes import WorkerEnded, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from typing import Self

    from ovmstrio.core.speech import TranscriptionRequest
    from ovmstrio.runtimes.generation.engine_process import EngineProcess

__all__ = ["RunningTranscript", "Transcripts"]

_SECONDS_TO_TELL: Final = 5.0
"""How long a message to a process may wait for it to read others."""

_TURNS: Final = 4
"""How many recordings take turns; the files of others stay where they are."""


class RunningTranscript:
    """A recording that is being written down; see :class:`ovmstrio.core.speech.Transcript`.

    Args:
        number: the process's number for it.
        turns: of which it has one, until it is over.

    Attributes:
        is_over: whether nothing more will come.
    """

    def __init__(self, number: int, turns: trio.Semaphore) -> None:
        self.number = number
        self._turns: trio.Semaphore | None = turns
        self.language = ""
        self.seconds = 0.0
        self._parts: deque[TranscriptPart] = deque()
        self._told = 0
        self.is_over = False
        self._error: ServerError | None = None
        self._news = trio.Event()

    def hear(self, text: str) -> None:
        """Take text that comes before the end of its window."""
        self._told += len(text)
        self._put(TranscriptPart(text))

    def take(self, window: dict[str, Any]) -> None:
        """Take all that was understood of a window."""
        self.language = window["language"] or self.language
        self.seconds = window["seconds"]
        start = window["start"]
        spans = (tuple(_spans(window[kind], start)) for kind in ("segments", "words"))
        self._put(TranscriptPart(window["text"][self._told :], *spans))
        self._told = 0
        if window["is_last"]:
            self.end()

    def end(self, error: ServerError | None = None) -> None:
        """Note that nothing more will come, because of an error if there is one."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self.leave_turn()
            self._wake()

    def leave_turn(self) -> None:
        """Let another one be heard."""
        if self._turns is not None:
            self._turns.release()
            self._turns = None

    def _put(self, part: TranscriptPart) -> None:
        self._parts.append(part)
        self._wake()

    def _wake(self) -> None:
        self._news.set()

    # No generator, which whoever leaves a loop early would have to close.
    def __aiter__(self) -> Self:
        """Give parts until the end."""
        return self

    async def __anext__(self) -> TranscriptPart:
        """Wait for the next part.

        Raises:
            ServerError: there will be none.
        """
        await trio.lowlevel.checkpoint()
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            self._news = trio.Event()
            await self._news.wait()
        return self._parts.popleft()


def _spans(rows: Iterable[tuple[float, float, str]], start: float) -> Iterable[SpokenSpan]:
    return (SpokenSpan(round(start + begin, 3), round(start + end, 3), text) for begin, end, text in rows)


class Transcripts:
    """All recordings of one model, through whichever processes it lives.

    Args:
        most_waiting: how many may wait for a turn.
        tasks: hosts a task for each; as long as it is open, recordings can be written down.

    Attributes:
        last_asked: when somebody has asked last, or has got an answer, on trio's clock.
    """

    def __init__(self, most_waiting: int, tasks: trio.Nursery) -> None:
        self._most = _TURNS + most_waiting
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._running: dict[int, RunningTranscript] = {}
        self._turns = trio.Semaphore(_TURNS, max_value=_TURNS)
        self._emptied = trio.Event()
        self.open = 0
        self.last_asked = -math.inf

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        while self.open:
            self._emptied = trio.Event()
            await self._emptied.wait()

    def hear(self, frame: Any) -> None:
        """Hand out text that a process has told of.

        Raises:
            ValueError, TypeError: it is none.
        """
        number, text = frame
        running = self._running.get(number)
        if running is not None:
            running.hear(text)

    def lose(self, why: str) -> None:
        """Tell all requests that their process has ended."""
        for running in self._running.values():
            running.end(ModelFailure(why))

    @asynccontextmanager
    async def ask(self, engine: EngineProcess, asked: TranscriptionRequest) -> AsyncIterator[RunningTranscript]:
        """Have a recording written down, once it is its turn.

        Raises:
            InvalidField, Overloaded, ServerError: as :meth:`Transcriber.transcribe`.

        Ownership: the recording, which the process drops when the block is left.
        Cancellation: anywhere.
        """
        if self.open >= self._most:
            message = f"{self.open} recordings are being written down or wait, as many as may; try again later"
            raise Overloaded(message)
        self.open += 1
        try:
            await self._turns.acquire()
            running = RunningTranscript(next(self._numbers), self._turns)
            try:
                async with self._opened(await engine.ready(), running, asked):
                    yield running
            finally:
                running.leave_turn()
        finally:
            self.open -= 1
            self.last_asked = trio.current_time()
            if not self.open:
                self._emptied.set()

    @asynccontextmanager
    async def _opened(
        self, process: WorkerProcess, running: RunningTranscript, asked: TranscriptionRequest
    ) -> AsyncIterator[None]:
        number = running.number
        self._running[number] = running
        scope = trio.CancelScope()
        try:
            await _call(process, ["open", number, asked.audio, _wanted(asked)])
            # A nursery of its own would put what the caller's block raises into a group.
            self._tasks.start_soon(_hear_all, process, running, scope)
            yield
        finally:
            scope.cancel()
            del self._running[number]
            await _close(process, number)


async def _hear_all(process: WorkerProcess, running: RunningTranscript, scope: trio.CancelScope) -> None:
    """Have one window after the other written down, until a scope is cancelled.

    Cancellation: at once; a window that has been begun is abandoned.
    """
    with scope:
        try:
            while not running.is_over:
                running.take(await _call(process, ["window", running.number]))
        except ServerError as error:
            running.end(error)


async def _close(process: WorkerProcess, number: int) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _SECONDS_TO_TELL), suppress(WorkerEnded):
        await process.tell(["close", number])


async def _call(process: WorkerProcess, value: list[Any]) -> Any:
    try:
        kind, *told = await process.call(value)
    except WorkerEnded as ended:
        raise ModelFailure(f"the process of the model {ended.why}") from ended
    if kind == REFUSED:
        raise decode_failure(told[0])
    return told[0] if kind == HEARD else None


def _wanted(asked: TranscriptionRequest) -> dict[str, Any]:
    return {
        "translates": asked.translates,
        "language": asked.language,
        "prompt": asked.prompt,
        "temperature": asked.temperature,
        "has_segments": asked.wants_segments,
        "has_words": asked.wants_words,
    }
