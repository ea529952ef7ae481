"""What a server asks of an engine, and the frames of its steps, handed out to the requests that they are for."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ModelFailure
from ovmstrio.core.tracing import current_span
from ovmstrio.inference.engine.messages import ACCEPTED, TOKENS, decode_failure, encode_request, encode_texts
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.text.answers import TextAnswer
from ovmstrio.text.text_metrics import CANCELLED, ERROR, TextMetrics
from ovmstrio.util.truncation import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from ovmstrio.core.generation import Finish, GenerationRequest, TokenRow
    from ovmstrio.core.tracing import Span
    from ovmstrio.isolation.worker_process import WorkerProcess
    from ovmstrio.text.engine_sharing import RemoteEngine

__all__ = ["EngineLink", "GenerationSpan", "OpenAnswer"]

# ----------------------------------------------------------------------
# The span of a text that is made: how long it waited, when its first token came, how many there were
# ----------------------------------------------------------------------


class GenerationSpan:
    """A part of a call that is recorded.

    Its phases are parts of it: ``queue`` until there is room in the batch, ``prefill`` until the first token, and
    ``decode``.  Steps are events of it, where the caller asks for them.

    Args:
        caller: what it is a part of, which is told the figures that the conventions want of a request.
    """

    __slots__ = ("_caller", "_is_decoding", "_phase", "_shows_steps", "_span")

    def __init__(self, caller: Span) -> None:
        self._caller = caller
        self._span = caller.begin("generation")
        self._shows_steps = caller.shows_steps
        self._is_decoding = False
        self._phase = self._span.begin("queue", {"ovmstrio.queue.of": "engine"})

    def prompted(self, tokens: int, cached: int) -> None:
        """Note that the prompt was taken in, and how many tokens it has."""
        for span in (self._span, self._caller):
            span.set("gen_ai.usage.input_tokens", tokens)
            span.set("gen_ai.usage.cache_read.input_tokens", cached)
        self._enter("prefill")

    def came(self, index: int, tokens: int) -> None:
        """Note that a step has brought tokens of one of the texts."""
        if not tokens:
            return
        if self._shows_steps:
            self._span.event("step", {"ovmstrio.text": index, "ovmstrio.tokens": tokens})
        if not self._is_decoding:
            self._is_decoding = True
            self._enter("decode")

    def end(self, tokens: int, finish: str | None) -> None:
        """End it; ``finish`` is why the text ends, None if it was not finished."""
        self._phase.end()
        for span in (self._span, self._caller):
            span.set("gen_ai.usage.output_tokens", tokens)
            if finish is not None:
                span.set("gen_ai.response.finish_reasons", finish)
        if finish is None:
            self._span.set("ovmstrio.cancelled", True)
        self._span.end()

    def _enter(self, phase: str) -> None:
        self._phase.end()
        self._phase = self._span.begin(phase)


# ----------------------------------------------------------------------
# What a server asks of an engine, and the frames of its steps, handed out to the requests that they are for
# ----------------------------------------------------------------------

if TYPE_CHECKING:
    AskedEngine = WorkerProcess | RemoteEngine


_SECONDS_TO_TELL: Final = 5.0
"""How long a message to an engine may wait for the engine to read others."""


class OpenAnswer:
    """An answer that is being made, and what is known of its prompt; see :data:`ACCEPTED`."""

    __slots__ = ("answer", "cached_tokens", "prompt_end", "prompt_tokens")

    def __init__(self, answer: TextAnswer, prompt_tokens: int, prompt_end: str, cached_tokens: int) -> None:
        self.answer = answer
        self.prompt_tokens = prompt_tokens
        self.prompt_end = prompt_end
        self.cached_tokens = cached_tokens


class EngineLink:
    """All requests of one engine, through whichever processes it lives.

    Args:
        metrics: are told of what happens.
        numbers: for requests; no two have the same.

    Attributes:
        last_asked: when somebody has asked last, or an answer has ended, on trio's clock.
    """

    def __init__(self, metrics: TextMetrics, numbers: Iterator[int]) -> None:
        self._metrics = metrics
        self._numbers = numbers
        self._answers: dict[int, TextAnswer] = {}
        self._spans: dict[int, GenerationSpan] = {}
        self._emptied = trio.Event()
        self.last_asked = -math.inf

    @property
    def open(self) -> int:
        """How many requests there are."""
        return len(self._answers)

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        while self._answers:
            self._emptied = trio.Event()
            await self._emptied.wait()

    def hear(self, frame: Any) -> None:
        """Hand out what a step has brought.

        Raises:
            ValueError, LookupError, TypeError: it is no frame.
        """
        rows, failures, figures = frame
        if figures is not None:
            self._metrics.stepped(figures)
        now = trio.current_time()
        for number, index, text, tokens, logprobs, finish in rows:
            answer = self._answers.get(number)
            if answer is not None:
                answer.put(index, text, tokens, logprobs, finish)
                self._count(answer, index, tokens, now)
                if self._spans and (span := self._spans.get(number)) is not None:
                    span.came(index, tokens)
        for number, failure in failures:
            answer = self._answers.get(number)
            if answer is not None:
                answer.fail(decode_failure(failure))

    @property
    def facts(self) -> dict[str, float]:
        """What is known of the batch."""
        return self._metrics.facts()

    def _count(self, answer: TextAnswer, index: int, tokens: int, now: float) -> None:
        self._metrics.generation_tokens.inc(tokens)
        last = answer.last_came.get(index)
        if last is not None:
            self._metrics.next_token.observe(now - last)
        elif not answer.last_came:
            self._metrics.first_token.observe(now - answer.began)
        answer.last_came[index] = now

    def _traced(self, number: int) -> GenerationSpan | None:
        """Begin the span of a request, if its call is recorded."""
        caller = current_span.get()
        if caller is None or not caller.is_recorded:
            return None
        span = self._spans[number] = GenerationSpan(caller)
        return span

    def lose(self, why: str) -> None:
        """Tell all requests that their process has ended, and count that."""
        self._metrics.lost()
        self.fail_all(why)

    def fail_all(self, why: str) -> None:
        """Tell all requests that their process has ended."""
        for answer in self._answers.values():
            answer.fail(ModelFailure(why))

    @asynccontextmanager
    async def ask(self, process: AskedEngine, asked: GenerationRequest) -> AsyncIterator[OpenAnswer]:
        """Have a request answered, once there is room for it.

        Raises:
            InvalidRequest, Overloaded, DeadlineExceeded, ModelFailure: as :meth:`TextGenerator.generate`.

        Ownership: the request, which is cancelled in the engine when the block is left before its end.

        Cancellation: at any checkpoint.
        """
        number = next(self._numbers)
        answer = self._answers[number] = TextAnswer(number, asked.n, asked.deadline)
        span = self._traced(number)
        try:
            with trio.CancelScope(deadline=asked.deadline) as scope:
                told = await self._call(process, "add", number, partial(encode_request, asked), asked.prompt_size)
            if scope.cancelled_caught:
                raise DeadlineExceeded("the deadline of the request passed while it waited for room in the batch")
            if told[0] != ACCEPTED:
                answer.is_over = True
                raise decode_failure(told[1])
            opened = OpenAnswer(answer, *told[1:])
            self._metrics.prompt_tokens.inc(opened.prompt_tokens)
            self._metrics.cached_tokens.inc(opened.cached_tokens)
            self._metrics.queue.observe(trio.current_time() - answer.began)
            if span is not None:
                span.prompted(opened.prompt_tokens, opened.cached_tokens)
            yield opened
        finally:
            del self._answers[number]
            if span is not None:
                del self._spans[number]
                span.end(answer.tokens, None if answer.finish is None else answer.finish.value)
            why: Finish | str = CANCELLED if not answer.is_over else answer.finish or ERROR
            self._metrics.finished(why, trio.current_time() - answer.began, answer.tokens)
            self.last_asked = trio.current_time()
            if not self._answers:
                self._emptied.set()
            if not answer.is_over:
                await self._cancel(process, number)

    async def _cancel(self, process: AskedEngine, number: int) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _SECONDS_TO_TELL), suppress(WorkerEnded):
            await process.tell(["cancel", number])

    async def tokenize(self, process: AskedEngine, texts: Sequence[str], **options: Any) -> list[TokenRow]:
        """Return the tokens of each text.

        Raises:
            InvalidRequest: a text cannot be tokenized.
            ModelFailure: the process has ended.

        Cancellation: at once; the engine tokenizes no further text.
        """
        self.last_asked = trio.current_time()
        number, size = next(self._numbers), sum(map(len, texts))
        try:
            kind, *told = await self._call(process, "tokenize", number, partial(encode_texts, texts), size, options)
        except trio.Cancelled:
            await self._cancel(process, number)
            raise
        if kind != TOKENS:
            raise decode_failure(told[0])
        tokens, counts = told
        ends = np.cumsum(counts).tolist()
        return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    async def _call(
        self, process: AskedEngine, kind: str, number: int, encode: Callable[[], Any], size: int, *more: Any
    ) -> Any:
        """Send a request to the engine, which a thread encodes if it has many characters."""
        try:
            encoded = encode() if size <= AT_ONCE else await trio.to_thread.run_sync(encode)
            return await process.call([kind, number, encoded, *more])
        except WorkerEnded as ended:
            raise ModelFailure(f"the process of the model {ended.why}") from ended
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the request holds what is no plain data: {error}") from error
