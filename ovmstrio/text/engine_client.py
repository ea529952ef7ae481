"""Client of one engine process: multiplexes requests, and routes the tokens of each step to their request."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ModelFailure, QueueTimeExceeded
from ovmstrio.core.generation import Finish, GenerationRequest, LikelyToken, TokenLogprob
from ovmstrio.core.tracing import current_span
from ovmstrio.inference.engine.messages import (
    ACCEPTED,
    FINISH_REASONS,
    TEXTS,
    TOKENS,
    decode_failure,
    encode_request,
    encode_texts,
)
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.text.text_metrics import CANCELLED, ERROR, TextMetrics
from ovmstrio.util.truncation import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.generation import Conversation, TokenRow
    from ovmstrio.core.tracing import Span
    from ovmstrio.isolation.worker_process import WorkerProcess
    from ovmstrio.text.engine_sharing import RemoteEngine

# ----------------------------------------------------------------------
# Output of one request
# ----------------------------------------------------------------------


@dataclass(slots=True)
class OutputChunk:
    """Unread output of text ``index``; ``parts`` are texts with their numbers of tokens."""

    index: int
    parts: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    stop: str = ""

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
        last_output_at: trio time of the last output, by text.
        listener: gets unread output while a task waits in :meth:`take`, without a switch to that task; returns False,
            having read none, if the task must take it. The task raises the listener's errors.
    """

    def __init__(self, number: int, texts: int, deadline: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self.tokens = 0
        self.finish: Finish | None = None
        self.began = trio.current_time()
        self.last_output_at: dict[int, float] = {}
        self.listener: Callable[[Iterable[OutputChunk]], bool] | None = None
        self._listener_error: Exception | None = None
        self._open_texts = texts
        self._deadline = deadline
        self._unread: dict[int, OutputChunk] = {}
        self._error: ServerError | None = None
        self._changed: trio.Event | None = None

    def put(
        self, index: int, text: str, tokens: int, logprobs: list[list[Any]] | None, finish: int | str | None
    ) -> None:
        """Append a row of a step's output, which :meth:`deliver` makes readable.

        ``logprobs`` has the tokens of the text, and those of the prompt; ``finish`` is the number of a reason, or a
        stop string.
        """
        made = self._unread.get(index)
        if made is None:
            made = self._unread[index] = OutputChunk(index)
        made.parts.append((text, tokens))
        made.tokens += tokens
        self.tokens += tokens
        if logprobs:
            made.logprobs += map(_decode_logprob, logprobs[0])
            made.prompt_logprobs += map(_decode_logprob, logprobs[1])
        if finish is not None:
            if isinstance(finish, str):
                made.stop = finish
                made.finish = self.finish = Finish.STOP
            else:
                made.finish = self.finish = FINISH_REASONS[finish]
            self._open_texts -= 1
            self.is_over = not self._open_texts

    def deliver(self) -> None:
        """Pass new output to the listener, or wake the reading task: always at the end of the texts.  Never blocks."""
        if self._changed is None or self._changed.is_set():
            return
        if self.listener is not None and self._unread and not self.is_over:
            try:
                if self.listener(self._unread.values()):
                    self._unread.clear()
                    return
            except Exception as error:  # noqa: BLE001 - an error of one request must not affect others
                self._listener_error = error
        self._changed.set()

    def fail(self, error: ServerError) -> None:
        """End the request with an error; earlier output stays readable."""
        if not self.is_over:
            self.is_over = True
            self._error = error
            self.deliver()

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
        if self._listener_error is not None:
            raise self._listener_error
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
        while not self._unread and not self.is_over and self._listener_error is None:
            self._changed = trio.Event()
            try:
                await self._changed.wait()
            finally:
                self._changed = None


def _decode_logprob(encoded: list[Any]) -> TokenLogprob:
    data, value, token, offset, top, rank = encoded
    likely = tuple(LikelyToken(bytes(each), logprob, number) for each, logprob, number in top)
    return TokenLogprob(bytes(data), value, token, offset, likely, rank)


# ----------------------------------------------------------------------
# Requests of one engine
# ----------------------------------------------------------------------


class GenerationSpan:
    """Span of one generation with phases ``queue``, ``prefill`` and ``decode``, and optional step events.

    Args:
        caller: parent span, which also gets the ``gen_ai`` attributes.
    """

    __slots__ = ("_caller", "_is_decoding", "_phase", "_shows_steps", "_span")

    def __init__(self, caller: Span) -> None:
        self._caller = caller
        self._span = caller.begin("generation")
        self._shows_steps = caller.shows_steps
        self._is_decoding = False
        self._phase = self._span.begin("queue", {"ovmstrio.queue.of": "engine"})

    def prompted(self, tokens: int, cached: int) -> None:
        """Record the end of the queue phase, and the prompt's tokens."""
        for span in (self._span, self._caller):
            span.set("gen_ai.usage.input_tokens", tokens)
            span.set("gen_ai.usage.cache_read.input_tokens", cached)
        self._enter("prefill")

    def came(self, index: int, tokens: int) -> None:
        """Record new tokens of a text."""
        if not tokens:
            return
        if self._shows_steps:
            self._span.event("step", {"ovmstrio.text": index, "ovmstrio.tokens": tokens})
        if not self._is_decoding:
            self._is_decoding = True
            self._enter("decode")

    def end(self, tokens: int, finish: str | None) -> None:
        """End the span; ``finish`` is the finish reason, None for a cancelled request."""
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


if TYPE_CHECKING:
    AskedEngine = WorkerProcess | RemoteEngine


_SEND_TIMEOUT_SECONDS: Final = 5.0
"""Longest wait for the engine to read a message."""


class AcceptedRequest:
    """Accepted request with the token counts of its prompt; see :data:`ACCEPTED`."""

    __slots__ = ("answer", "cached_tokens", "own_cached_tokens", "prompt_end", "prompt_tokens")

    def __init__(
        self, answer: OutputBuffer, prompt_tokens: int, prompt_end: str, cached_tokens: int, own_cached_tokens: int
    ) -> None:
        self.answer = answer
        self.prompt_tokens = prompt_tokens
        self.prompt_end = prompt_end
        self.cached_tokens = cached_tokens
        self.own_cached_tokens = own_cached_tokens


class EngineClient:
    """Client of one engine with all its open requests; survives restarts of the engine process.

    Args:
        metrics: metrics of the model.
        numbers: request ids.
        max_queue_time: longest wait of a request in seconds, until it runs; None for no limit.

    Attributes:
        last_asked: trio time of the last start or end of a request.
    """

    def __init__(self, metrics: TextMetrics, numbers: Iterator[int], max_queue_time: float | None = None) -> None:
        self._max_queue_time = math.inf if max_queue_time is None else max_queue_time
        self._metrics = metrics
        self._numbers = numbers
        self._answers: dict[int, OutputBuffer] = {}
        self._undelivered: dict[int, OutputBuffer] = {}
        self._spans: dict[int, GenerationSpan] = {}
        self._idle_event = trio.Event()
        self.last_asked = -math.inf

    @property
    def open(self) -> int:
        """Number of open requests."""
        return len(self._answers)

    async def idle(self) -> None:
        """Wait until there is no request."""
        while self._answers:
            self._idle_event = trio.Event()
            await self._idle_event.wait()

    def hear(self, frame: Any) -> None:
        """Route the output of a step, which :meth:`deliver` makes readable.

        Raises:
            ValueError, LookupError, TypeError: the message is malformed.
        """
        rows, failures, figures = frame
        if figures is not None:
            self._metrics.stepped(figures)
        now = trio.current_time()
        all_tokens, latencies = 0, []
        for number, index, text, tokens, logprobs, finish in rows:
            answer = self._answers.get(number)
            if answer is not None:
                answer.put(index, text, tokens, logprobs, finish)
                self._undelivered[number] = answer
                all_tokens += tokens
                last = answer.last_output_at.get(index)
                if last is not None:
                    latencies.append(now - last)
                elif not answer.last_output_at:
                    self._metrics.first_token.observe(now - answer.began)
                answer.last_output_at[index] = now
                if self._spans and (span := self._spans.get(number)) is not None:
                    span.came(index, tokens)
        for number, failure in failures:
            answer = self._answers.get(number)
            if answer is not None:
                answer.fail(decode_failure(failure))
        self._metrics.generated(all_tokens, latencies)

    def deliver(self) -> None:
        """Make the output of the last steps readable, all of a request at once."""
        if self._undelivered:
            answers, self._undelivered = self._undelivered, {}
            for answer in answers.values():
                answer.deliver()

    @property
    def facts(self) -> dict[str, float]:
        """State of the batch, for introspection."""
        return self._metrics.facts()

    def _begin_span(self, number: int) -> GenerationSpan | None:
        caller = current_span.get()
        if caller is None or not caller.is_recorded:
            return None
        span = self._spans[number] = GenerationSpan(caller)
        return span

    def lose(self, reason: str) -> None:
        """Fail all requests because the engine process has ended, and count the restart."""
        self._metrics.lost()
        self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """Fail all open requests with ``ModelFailure``."""
        for answer in self._answers.values():
            answer.fail(ModelFailure(reason))

    @asynccontextmanager
    async def ask(self, process: AskedEngine, asked: GenerationRequest) -> AsyncIterator[AcceptedRequest]:
        """Submit a request; the block begins once the engine has accepted it, and leaving it early cancels the request.

        Raises:
            InvalidRequest, Overloaded, DeadlineExceeded, ModelFailure: as :meth:`TextGenerator.generate`.
        """
        number = next(self._numbers)
        answer = self._answers[number] = OutputBuffer(number, asked.n, asked.deadline)
        span = self._begin_span(number)
        try:
            deadline = min(asked.deadline, trio.current_time() + self._max_queue_time)
            with trio.CancelScope(deadline=deadline) as scope:
                answered = await self._call(process, "add", number, partial(encode_request, asked), asked.prompt_size)
            if scope.cancelled_caught and deadline < asked.deadline:
                raise QueueTimeExceeded.after(self._max_queue_time)
            if scope.cancelled_caught:
                raise DeadlineExceeded("the deadline passed while the request waited for room in the batch")
            if answered[0] != ACCEPTED:
                answer.is_over = True
                raise decode_failure(answered[1])
            opened = AcceptedRequest(answer, *answered[1:])
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
                self._idle_event.set()
            if not answer.is_over:
                await self._cancel(process, number)

    async def _cancel(self, process: AskedEngine, number: int) -> None:
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + _SEND_TIMEOUT_SECONDS),
            suppress(WorkerExited),
        ):
            await process.notify(["cancel", number])

    async def tokenize(self, process: AskedEngine, texts: Sequence[str], **options: Any) -> list[TokenRow]:
        """Return the tokens of each text.

        Raises:
            InvalidRequest: a text cannot be tokenized.
            ModelFailure: the process has ended.
        """
        size = sum(map(len, texts))
        tokens, counts = await self._convert(process, "tokenize", partial(encode_texts, texts), size, options)
        ends = np.cumsum(counts).tolist()
        return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    async def tokenize_prompt(self, process: AskedEngine, prompt: Conversation) -> TokenRow:
        """Return the tokens of the prompt of a conversation; raises as :meth:`tokenize`."""
        asked = GenerationRequest(prompt)
        encode = partial(encode_request, asked)
        tokens, _ = await self._convert(process, "tokenize prompt", encode, asked.prompt_size)
        row: TokenRow = tokens
        return row

    async def detokenize(self, process: AskedEngine, tokens: TokenRow, *, is_joined: bool) -> list[str]:
        """Return the text of tokens, or the text of each of them; raises as :meth:`tokenize`."""
        ids = np.asarray(tokens).tolist()
        (texts,) = await self._convert(process, "detokenize", lambda: None, 0, ids, is_joined)
        return list(texts)

    async def _convert(
        self, process: AskedEngine, kind: str, encode: Callable[[], Any], size: int, *more: Any
    ) -> list[Any]:
        """Send a tokenization request to the engine and return the response."""
        self.last_asked = trio.current_time()
        number = next(self._numbers)
        try:
            answer: list[Any] = await self._call(process, kind, number, encode, size, *more)
        except trio.Cancelled:
            await self._cancel(process, number)
            raise
        if answer[0] not in {TOKENS, TEXTS}:
            raise decode_failure(answer[1])
        return answer[1:]

    async def _call(
        self, process: AskedEngine, kind: str, number: int, encode: Callable[[], Any], size: int, *more: Any
    ) -> Any:
        """Send a request to the engine, encoding large ones in a thread."""
        try:
            encoded = encode() if size <= AT_ONCE else await trio.to_thread.run_sync(encode)
            return await process.call([kind, number, encoded, *more])
        except WorkerExited as ended:
            raise ModelFailure(f"the engine process {ended.why}") from ended
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the request cannot be encoded: {error}") from error
