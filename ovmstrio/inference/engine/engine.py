"""Requests of one model in an engine process: template, grammar, admission, batch and output rows."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ovmstrio.core.errors import Overloaded, ServerError
from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.inference.engine.batch import Batch, BlockAdmission, BlockCapacity, BlockDemand
from ovmstrio.inference.engine.grammar_precompile import GrammarQueue
from ovmstrio.inference.engine.messages import (
    ACCEPTED,
    CANCELLED,
    REJECTED,
    TOKENS,
    decode_request,
    decode_texts,
    encode_failure,
)
from ovmstrio.inference.engine.prompts import PromptScorer
from ovmstrio.inference.engine.sequences import QueuedRequest, SequenceOutput
from ovmstrio.inference.engine.step_output import OutputRows
from ovmstrio.inference.engine.template_process import RenderQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.inference.engine.grammar_precompile import GrammarCompiler
    from ovmstrio.inference.engine.pipeline import Pipeline
    from ovmstrio.inference.engine.prompts import PromptTokenizer
    from ovmstrio.inference.engine.template_process import TemplateProcess

_PACE_WEIGHT: Final = 0.2
_MAX_RETRY_SECONDS: Final = 60.0
_SEEDS: Final = 2**32
# How long running sequences wait for a conversation to be rendered; most take less than a millisecond.
_RENDER_SECONDS: Final = 0.02


class Limits(NamedTuple):
    """Request limits."""

    tokens: int  # prompt and answer together
    answer: int | None = None  # tokens of an answer; None for as many as fit
    texts: int = 256  # concurrent sequences
    waiting: int = 256  # requests in the queue
    overcommit: float = 1.0  # KV-cache overcommit factor; 1.0 admits a request only if its worst case fits


class _AddedRequest(NamedTuple):
    message: int
    number: int
    request: GenerationRequest


class Engine:
    """Requests of one model.

    Args:
        answer: sends an answer to the message of a number.
        forms: compiles grammars.
        templates: process that renders conversations; without it ``prompts`` renders them.
        caches_prefixes: whether the pipeline has a prefix cache.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: PromptTokenizer,
        limits: Limits,
        answer: Callable[[int, Any], None],
        forms: GrammarCompiler,
        *,
        templates: TemplateProcess | None = None,
        caches_prefixes: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._limits = limits
        self._answer = answer
        room = BlockCapacity(pipeline.blocks, pipeline.block_tokens, limits.texts, limits.overcommit, caches_prefixes)
        self._admission: BlockAdmission[QueuedRequest] = BlockAdmission(room, limits.waiting)
        self._batch = Batch(pipeline)
        self._grammars = GrammarQueue(forms)
        self._renderings = None if templates is None else RenderQueue[_AddedRequest](templates)
        self._scores = PromptScorer(pipeline, limits.tokens)
        self._rows = OutputRows(self._decode)
        self._unrendered: dict[int, _AddedRequest] = {}
        self._requests: dict[int, QueuedRequest] = {}
        self._new_rows: list[list[Any]] = []
        self._failures: list[list[Any]] = []
        self._seconds_per_request = 1.0
        self._last_end = time.monotonic()

    def _decode(self, rows: list[list[int]], skips_special_tokens: bool) -> list[str]:
        decode = self._pipeline.tokenizer.decode
        if skips_special_tokens:
            return decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]
        # The library pads shorter rows with special tokens, which would appear in the text.
        return [decode(row, skip_special_tokens=False) for row in rows]

    @property
    def is_busy(self) -> bool:
        """Return whether :meth:`step` has work."""
        has_rendered = self._renderings is not None and self._renderings.has_ended
        has_news = self._new_rows or self._failures or self._grammars.has_ended or has_rendered
        return self._batch.is_busy or self._scores.is_busy or bool(has_news)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a grammar is compiled or a conversation rendered."""
        return [self._grammars.descriptor, *([] if self._renderings is None else [self._renderings.descriptor])]

    @property
    def seconds_left(self) -> float | None:
        """Seconds after which :attr:`is_busy` may change without a message or a descriptor."""
        return None if self._renderings is None else self._renderings.seconds_left

    def add(self, message: int, number: int, plain: dict[str, Any]) -> None:
        """Queue a request; its message is answered when the request runs or is rejected."""
        try:
            request = decode_request(plain)
            waiting = self._admission.waiting if request.grammar is None else self._grammars.waiting
            if self._renderings is not None and isinstance(request.prompt, Conversation):
                waiting += self._renderings.waiting
            if waiting and self._waiting >= self._limits.waiting:
                raise self._overloaded()
            added = _AddedRequest(message, number, request)
            if self._renderings is None or not isinstance(request.prompt, Conversation):
                self._add_tokens(added, self._prompts.tokenize_prompt(request.prompt))
                return
            self._unrendered[number] = added
            self._renderings.add(added, request.prompt, _RENDER_SECONDS)
            self._take_rendered()
        except ServerError as error:
            self._answer(message, [REJECTED, encode_failure(error)])

    def _take_rendered(self) -> None:
        while self._renderings is not None and self._renderings.has_ended:
            rendered = self._renderings.take()
            if rendered is None:
                continue
            added, outcome = rendered
            del self._unrendered[added.number]
            try:
                if isinstance(outcome, ServerError):
                    raise outcome
                self._add_tokens(added, self._prompts.tokenize_rendered(outcome))
            except ServerError as error:
                self._answer(added.message, [REJECTED, encode_failure(error)])

    def _add_tokens(self, added: _AddedRequest, tokens: list[int]) -> None:
        queued = self._prepare(added, tokens)
        if queued.is_grammar_proven:
            self._take(queued)
            return
        self._requests[added.number] = queued
        self._grammars.wait(queued)
        self._compile_next()

    @property
    def _waiting(self) -> int:
        rendered = 0 if self._renderings is None else self._renderings.waiting
        return self._admission.waiting + self._grammars.waiting + rendered

    def _overloaded(self) -> Overloaded:
        waiting = self._waiting
        seconds = min(max(1.0, waiting * self._seconds_per_request), _MAX_RETRY_SECONDS)
        message = f"{waiting} requests are queued already (max_queue); try again in {seconds:.0f} s"
        return Overloaded(message, retry_after_seconds=seconds)

    def _prepare(self, added: _AddedRequest, tokens: list[int]) -> QueuedRequest:
        request = added.request
        max_tokens = request.sampling.max_tokens
        self._prompts.check_length(tokens, needs_answer=max_tokens != 0)
        most = min(value for value in (max_tokens, self._limits.answer, self._limits.tokens) if value is not None)
        seed = request.sampling.seed
        return QueuedRequest(
            id=added.number,
            message_number=added.message,
            request=request,
            prompt=tokens,
            most=min(most, self._limits.tokens - len(tokens)),
            seed=random.randrange(_SEEDS) if seed is None else seed,  # noqa: S311 - no secret
            is_open=max_tokens is None and self._limits.answer is None,
            is_grammar_proven=request.grammar is None,
        )

    def _take(self, queued: QueuedRequest) -> None:
        texts = max(queued.request.n, queued.request.sampling.best_of)
        need = BlockDemand(len(queued.prompt), queued.most, texts, queued.is_open)
        if self._admission.is_full and (self._admission.waiting or not self._admission.fits_now(need)):
            raise self._overloaded()
        self._requests[queued.id] = queued
        self._admission.wait(queued, need)
        self._admit()

    def _compile_next(self) -> None:
        """Start the next grammar check; none compiles while a running sequence is about to compile its own grammar."""
        self._grammars.go_on(may_compile=not self._batch.is_compiling_grammar)

    def _take_compiled(self) -> None:
        while self._grammars.has_ended:
            tried = self._grammars.take()
            if tried is not None:
                self._proceed(self._take, *tried)
            self._compile_next()

    def _proceed(
        self, proceed: Callable[[QueuedRequest], None], queued: QueuedRequest, error: ServerError | None = None
    ) -> None:
        """Take the next step of a request, or fail it."""
        try:
            if error is not None:
                raise error
            proceed(queued)
        except ServerError as failure:
            self._forget(queued)
            self._fail(queued, failure)

    def _admit(self) -> None:
        """Admit queued requests; of those with unproven grammars only one at a time."""
        while (queued := self._admission.head()) is not None and self._batch.takes(queued):
            if not queued.is_grammar_proven and self._batch.has_unproven_grammar:
                return
            self._admission.enter(queued.id)
            self._proceed(self._begin, queued)

    def _begin(self, queued: QueuedRequest) -> None:
        """Run a request; if prompt log-probabilities are requested, score the prompt first."""
        request = queued.request
        queued.left = request.n
        if request.echo and request.logprobs and not queued.prompt_logprobs:
            self._scores.begin(queued)
        elif queued.most:
            self._batch.begin(queued)
        else:
            self._emit([SequenceOutput(queued, index, [], [], Finish.LENGTH) for index in range(request.n)])
        if queued.is_grammar_proven:
            self._accept(queued)

    def _accept(self, queued: QueuedRequest) -> None:
        if queued.message_number:
            end = self._prompts.rendered_end(queued.request.prompt, queued.prompt)
            self._answer(queued.message_number, [ACCEPTED, len(queued.prompt), end, queued.cached])
            queued.message_number = 0

    def cancel(self, number: int) -> None:
        """Cancel a request in any state; ignored if it has ended."""
        added = self._unrendered.pop(number, None)
        if added is not None and self._renderings is not None:
            self._renderings.withdraw(added)
            self._answer(added.message, [REJECTED, encode_failure(CANCELLED)])
        queued = self._requests.get(number)
        if queued is None:
            return
        self._grammars.withdraw(queued)
        self._admission.withdraw(queued)
        reads_on = self._batch.cancel(queued)
        self._scores.cancel(queued)
        self._forget(queued, keeps_room=reads_on)
        if queued.message_number:
            self._answer(queued.message_number, [REJECTED, encode_failure(CANCELLED)])
            queued.message_number = 0
        self._admit()
        self._compile_next()

    def _forget(self, queued: QueuedRequest, *, has_ended: bool = False, keeps_room: bool = False) -> None:
        self._requests.pop(queued.id, None)
        self._rows.forget(queued)
        if keeps_room:
            return
        self._admission.leave(queued.id, queued.generated // queued.request.n if has_ended else None)
        if has_ended:
            now = time.monotonic()
            self._seconds_per_request += _PACE_WEIGHT * (now - self._last_end - self._seconds_per_request)
            self._last_end = now

    def _fail(self, queued: QueuedRequest, error: ServerError) -> None:
        if queued.message_number:
            self._answer(queued.message_number, [REJECTED, encode_failure(error)])
            queued.message_number = 0
        else:
            self._failures.append([queued.id, encode_failure(error)])

    def step(self) -> list[Any]:
        """Generate the next token of each sequence; return [rows, failures, figures].

        Figures are: seconds, sequences in the step, sequences still running, queued requests, used fraction of the KV
        cache, rebuilds of the batch, and suspensions. RuntimeError means that the model is lost.
        """
        started = time.perf_counter()
        self._take_rendered()
        self._take_compiled()
        size = self._batch.running
        if self._batch.is_busy:
            self._step_batch()
        for queued, error in self._scores.step():
            self._proceed(self._begin, queued, error)
        self._admit()
        self._compile_next()
        rows, self._new_rows = self._new_rows, []
        failures, self._failures = self._failures, []
        seconds = time.perf_counter() - started
        batch = self._batch
        counts = [batch.rebuilds, batch.suspensions]
        figures = [seconds, size, batch.running, self._waiting, batch.used, *counts]
        return [rows, failures, figures]

    def _step_batch(self) -> None:
        outcome = self._batch.step()
        for queued, error in outcome.failed:
            self._forget(queued)
            self._fail(queued, error)
        for queued in outcome.left:
            self._admission.leave(queued.id)
        for queued in outcome.newly_proven:
            self._accept(queued)
        self._emit([new for new in outcome.news if new.asked.id in self._requests])

    def _emit(self, news: list[SequenceOutput]) -> None:
        rows = self._rows.make(news)
        self._new_rows += rows
        for new, row in zip(news, rows, strict=True):
            queued = new.asked
            queued.generated += len(new.tokens)
            if row[-1] is None:
                continue
            if new.finish is None:
                self._batch.end(queued, new.index)
            queued.left -= 1
            if not queued.left:
                self._forget(queued, has_ended=True)


_CHARACTERS_AT_ONCE: Final = 2**15  # tokenized within about 10 ms, during which running sequences wait
_TEXTS_AT_ONCE: Final = 64

Tokens = npt.NDArray[np.int64]


class _TokenizeRequest:
    __slots__ = ("message", "options", "rows", "texts")

    def __init__(self, message: int, texts: list[str], options: dict[str, Any]) -> None:
        self.message = message
        self.texts = deque(texts)
        self.options = options
        self.rows: list[Tokens] = []

    def next_texts(self) -> list[str]:
        """Take one text, or several short ones; each costs as much as the longest."""
        taken = [self.texts.popleft()]
        longest = len(taken[0])
        while self.texts and len(taken) < _TEXTS_AT_ONCE:
            longest = max(longest, len(self.texts[0]))
            if longest * (len(taken) + 1) > _CHARACTERS_AT_ONCE:
                break
            taken.append(self.texts.popleft())
        return taken


class TokenizeQueue:
    """Queue of tokenization requests, processed a few texts at a time between the steps of an engine."""

    def __init__(self, tokenize: Callable[..., list[Tokens]], answer: Callable[[int, Any], None]) -> None:
        self._tokenize = tokenize
        self._answer = answer
        self._open: dict[int, _TokenizeRequest] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether a request is open."""
        return bool(self._open)

    def add(self, message: int, number: int, texts: dict[str, Any], options: dict[str, Any]) -> None:
        """Queue a request, which :meth:`go_on` answers."""
        self._open[number] = _TokenizeRequest(message, decode_texts(texts), options)

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        tokenized = self._open.pop(number, None)
        if tokenized is not None:
            self._answer(tokenized.message, [REJECTED, encode_failure(CANCELLED)])

    def go_on(self) -> None:
        """Tokenize the next texts of the oldest request, and answer it after the last one."""
        number = next(iter(self._open), None)
        if number is None:
            return
        tokenized = self._open[number]
        try:
            if tokenized.texts:
                tokenized.rows += self._tokenize(tokenized.next_texts(), **tokenized.options)
        except ServerError as error:
            del self._open[number]
            self._answer(tokenized.message, [REJECTED, encode_failure(error)])
            return
        if not tokenized.texts:
            del self._open[number]
            counts = np.array([len(row) for row in tokenized.rows], np.int64)
            tokens = np.concatenate(tokenized.rows) if tokenized.rows else np.empty(0, np.int64)
            self._answer(tokenized.message, [TOKENS, tokens, counts])
