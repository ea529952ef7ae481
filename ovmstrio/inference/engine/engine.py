"""Engine of one model and the main loop of its process: receive messages, run a step, send its output in one frame.

A request passes template, grammar, admission and batch, and has rows in the output of each step.

::

    first                                       ["loaded", facts] or ["failed", reason]
    ["add", id, request]                        ["accepted", prompt tokens] or ["refused", error]
    ["tokenize", id, texts, options]            ["tokens", tokens, counts] or ["refused", error]
    ["tokenize prompt", id, request]            as for "tokenize"
    ["detokenize", id, tokens, is_joined]       ["texts", texts] or ["refused", error]
    ["cancel", id]                              not answered; a request that it ends unanswered is refused
    number 0, each step                         [rows, failures, figures]; see :meth:`Engine.step`
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ovmstrio.core.errors import InvalidField, InvalidRequest, Overloaded, ServerError
from ovmstrio.core.generation import Conversation, Finish, StopStrings
from ovmstrio.inference.engine.batch import (
    Batch,
    BlockAdmission,
    BlockCapacity,
    BlockDemand,
    QueuedRequest,
    SequenceOutput,
)
from ovmstrio.inference.engine.grammar_precompile import GrammarCompiler, GrammarQueue
from ovmstrio.inference.engine.messages import (
    ACCEPTED,
    CANCELLED,
    FAILED,
    FINISH_REASONS,
    LOADED,
    REJECTED,
    TEXTS,
    TOKENIZER_FILE,
    TOKENS,
    decode_request,
    decode_texts,
    encode_failure,
)
from ovmstrio.inference.engine.pipeline import Pipeline, PipelineOptions, library_error_message
from ovmstrio.inference.engine.prompts import (
    PromptOptions,
    PromptTokenizer,
    RenderQueue,
    choose_renderer,
    context_length,
    read_architectures,
)
from ovmstrio.inference.engine.scoring import ScoreJob, TokenScore, TokenScorer
from ovmstrio.inference.engine.tokenizer import find_token_bound
from ovmstrio.util.truncation import encode_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ovmstrio.core.generation import GenerationRequest, Sampling
    from ovmstrio.inference.engine.image_prompts import ImagePromptTokenizer
    from ovmstrio.inference.engine.pipeline import ImagePrompt
    from ovmstrio.inference.engine.prompts import TemplateProcess
    from ovmstrio.isolation.blocking_channel import BlockingChannel
    from ovmstrio.isolation.messages import Message

# ----------------------------------------------------------------------
# Output rows of a step: incremental detokenization, stop strings, echo and log-probabilities
# ----------------------------------------------------------------------

_MAX_WINDOW: Final = 24
_OVERLAP: Final = 6  # tokens decoded again; an incomplete UTF-8 character has at most three bytes, and so tokens
_UNKNOWN: Final = "�"
_UNFINISHED: Final = 3  # replacement characters of one incomplete character


class TokenWindow:
    """Sliding window of a sequence's last tokens, for incremental detokenization.

    The owner decodes the rows of :meth:`push` for all sequences in one call and passes the texts to :meth:`take`.
    """

    __slots__ = ("_emitted", "_has_base", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._emitted = 0
        self._has_base = False

    def push(self, tokens: Sequence[int]) -> list[list[int]]:
        """Append tokens and return the rows to decode."""
        self._has_base = len(self._tokens) > _MAX_WINDOW
        if self._has_base:
            base = self._tokens[-_OVERLAP:]
            self._tokens = [*base, *tokens]
            return [self._tokens, base]
        self._tokens += tokens
        return [self._tokens]

    def take(self, texts: Sequence[str], *, is_last: bool) -> str:
        """Return the new text; an incomplete character is held back until the last call."""
        if self._has_base:
            self._emitted = _stable_length(texts[1])
        end = len(texts[0]) if is_last else _stable_length(texts[0])
        new = texts[0][self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new


def _stable_length(text: str) -> int:
    """Return the length of the text that later tokens cannot change."""
    length = len(text)
    minimum = max(0, length - _UNFINISHED)
    while length > minimum and text[length - 1] == _UNKNOWN:
        length -= 1
    return length


_BYTE_TOKEN: Final = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_MAX_SKIPPED: Final = 16  # bytes of a text that may lie between two tokens, such as characters that were normalized


class TokenBytes:
    """Bytes of the tokens of texts, also of a token that is a part of a character.

    Args:
        tokenizer: the library's tokenizer.
        decode: decodes rows of tokens; the second argument is whether special tokens are skipped.
    """

    def __init__(self, tokenizer: Any, decode: Callable[[list[list[int]], bool], list[str]]) -> None:
        self._tokenizer = tokenizer
        self._decode = decode
        self._vocabulary: dict[int, bytes] = {}
        self._anchor = 0  # an ordinary token, after which a token is decoded as within a text
        self._known: dict[int, tuple[bytes, bytes]] = {}  # within a text, and at its beginning

    def learn(self, tokens: Iterable[int]) -> None:
        """Prepare :meth:`split` for texts of these tokens."""
        unknown = sorted(set(tokens) - self._known.keys())
        if not unknown:
            return
        if not self._vocabulary:
            self._vocabulary = {number: stored for stored, number in self._tokenizer.get_vocab().items()}
            self._anchor = int(self._tokenizer.encode("a", add_special_tokens=False).input_ids.data[0][-1])
        first = self._decode([[token] for token in unknown], False)
        anchor, *within = self._decode([[self._anchor], *([self._anchor, token] for token in unknown)], False)
        for token, alone, text in zip(unknown, first, within, strict=True):
            stored = self._vocabulary.get(token, b"")
            self._known[token] = _forms(stored, alone, text.removeprefix(anchor))

    def of_token(self, token: int) -> bytes:
        """Return the bytes of a learned token within a text."""
        return self._known[token][0]

    def split(self, text: str, tokens: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """Yield the bytes of each token, and the index of the character of the text that begins with it or has it.

        A token that is not in the text, such as a special token, has the index of the character after it.
        """
        data, end, characters = encode_text(text), 0, 0
        for token in tokens:
            found, first = self._known[token]
            if not data.startswith(found, end) and data.startswith(first, end):
                found = first
            begin = data.find(found, end, end + len(found) + _MAX_SKIPPED) if found else end
            begin, stop = (end, end) if begin < 0 else (begin, begin + len(found))
            characters += _count_characters(data[end:begin])
            yield found, characters - (begin < len(data) and not _count_characters(data[begin : begin + 1]))
            characters += _count_characters(data[begin:stop])
            end = stop


def _forms(stored: bytes, alone: str, within: str) -> tuple[bytes, bytes]:
    """Return a token's bytes within a text and at its beginning, where some tokenizers drop a space.

    The vocabulary has the bytes of parts of characters, which do not decode; its other tokens may be marked up.
    """
    byte = _BYTE_TOKEN.fullmatch(stored)
    if byte is not None and alone.encode() != stored:
        stored = bytes.fromhex(byte[1].decode())
        return stored, stored
    try:
        if stored.decode() != alone:
            return within.encode(), alone.encode()
    except UnicodeDecodeError:
        pass
    return stored, stored


def _count_characters(data: bytes) -> int:
    """Return the number of characters that begin in UTF-8 data."""
    return sum(byte & 0xC0 != 0x80 for byte in data)  # noqa: PLR2004 - the bits of a continuation byte


class _Output:
    __slots__ = ("characters", "has_begun", "stops", "window")

    def __init__(self, queued: QueuedRequest) -> None:
        self.window = TokenWindow()
        self.characters = 0  # of the text so far
        self.stops = StopStrings(queued.request.stop, keeps=queued.request.includes_stop)
        self.has_begun = False  # whether the first row is built


class OutputRows:
    """Builds output rows: id, index, text, token count, log-probabilities, and finish reason or stop string.

    The log-probabilities are None, or those of the text and those of the prompt: bytes, log-probability, token, offset,
    most likely tokens (bytes, log-probability and token) and rank of each token.
    """

    def __init__(self, decode: Callable[[list[list[int]], bool], list[str]], token_bytes: TokenBytes) -> None:
        self._decode = decode
        self._token_bytes = token_bytes
        self._outputs: dict[tuple[int, int], _Output] = {}

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; bytes that are no text are replaced."""
        self._token_bytes.learn(tokens)
        return [self._token_bytes.of_token(token).decode(errors="replace") for token in tokens]

    def forget(self, queued: QueuedRequest) -> None:
        """Drop the state of a request."""
        for index in range(queued.request.n):
            self._outputs.pop((queued.id, index), None)

    def make(self, news: Sequence[SequenceOutput]) -> list[list[Any]]:
        """Return a row for each item, in order; a row ends at a stop string."""
        texts = self._texts(news)
        self._learn_tokens(news)
        return [self._row(new, text) for new, text in zip(news, texts, strict=True)]

    def _output(self, new: SequenceOutput) -> _Output:
        key = new.asked.id, new.index
        if key not in self._outputs:
            self._outputs[key] = _Output(new.asked)
        return self._outputs[key]

    def _texts(self, news: Sequence[SequenceOutput]) -> list[str]:
        """Decode in one call per setting of special tokens."""
        queued = [
            (self._output(new).window.push(_output_tokens(new)), new.asked.request.skips_special_tokens) for new in news
        ]
        decoded: dict[bool, list[str]] = {}
        for skips in {skips for _, skips in queued}:
            decoded[skips] = self._decode([row for rows, each in queued if each is skips for row in rows], skips)
        places = {True: 0, False: 0}
        texts = []
        for new, (rows, skips) in zip(news, queued, strict=True):
            place = places[skips]
            places[skips] += len(rows)
            taken = decoded[skips][place : places[skips]]
            texts.append(self._output(new).window.take(taken, is_last=new.finish is not None))
        return texts

    def _learn_tokens(self, news: Sequence[SequenceOutput]) -> None:
        tokens = {token for new in news if new.asked.request.logprobs for token in new.tokens}
        for new in news:
            if not self._output(new).has_begun:
                asked = new.asked
                tokens.update(asked.prompt if asked.request.echo and asked.request.logprobs else ())
                tokens.update(_tokens_of(asked.prompt, asked.prompt_scores))
        self._token_bytes.learn(tokens)

    def _row(self, new: SequenceOutput, decoded: str) -> list[Any]:
        output, request, finish = self._output(new), new.asked.request, new.finish
        text = output.stops.feed(decoded)
        if not output.stops.found and finish is not None:
            text += output.stops.finish()
        logprobs: list[list[Any]] = []
        of_prompt: list[list[Any]] = []
        if not output.has_begun:
            output.has_begun = True
            asked = new.asked
            if request.echo:
                prompt = request.prompt
                if not isinstance(prompt, str) or request.prompt_limit is not None:
                    prompt = self._decode([asked.prompt], request.skips_special_tokens)[0]
                text = prompt + text
                if request.logprobs:
                    scores = asked.prompt_scores or [TokenScore(None)] * len(asked.prompt)
                    logprobs = self._logprobs(prompt, 0, asked.prompt, scores, 1)
                output.characters = len(prompt)
            if asked.prompt_scores and new.index == 0:
                of_prompt = self.prompt_logprobs(asked, asked.prompt_scores)
        if request.logprobs:
            tokens = _output_tokens(new)
            is_best = new.asked.takes_best_tokens
            values = zip(tokens, new.logprobs, strict=False)
            scores = [TokenScore(value, 0, [(token, value)] if is_best else ()) for token, value in values]
            logprobs += self._logprobs(decoded, output.characters, tokens, scores, 1)
            output.characters += len(decoded)
        end = output.stops.found or (None if finish is None else FINISH_REASONS.index(finish))
        found = [logprobs, of_prompt] if logprobs or of_prompt else None
        return [new.asked.id, new.index, text, len(new.tokens), found, end]

    def prompt_logprobs(self, queued: QueuedRequest, scores: Sequence[TokenScore]) -> list[list[Any]]:
        """Return the log-probabilities of a prompt, empty unless requested; their offsets are 0."""
        top = queued.request.prompt_logprobs
        if top is None:
            return []
        self._token_bytes.learn(_tokens_of(queued.prompt, scores))
        parts = zip(queued.prompt, scores, strict=False)
        return [self._logprob(self._token_bytes.of_token(token), token, 0, score, top) for token, score in parts]

    def set_scores(self, rows: Sequence[list[Any]], scores: Sequence[TokenScore], top: int) -> None:
        """Set the log-probabilities of the tokens of rows, which are the last ones that are scored."""
        found = [each for row in rows if row[4] is not None for each in row[4][0]]
        last = scores[len(scores) - len(found) :]
        self._token_bytes.learn(_tokens_of((), last))
        for each, score in zip(found, last, strict=True):
            data, _, token, offset, *_ = each
            each[:] = self._logprob(bytes(data), token, offset, score, top)

    def _logprobs(
        self, text: str, start: int, tokens: Sequence[int], scores: Sequence[TokenScore], top: int
    ) -> list[list[Any]]:
        """Return the log-probabilities of the tokens of a text that begins at ``start``."""
        parts = zip(self._token_bytes.split(text, tokens), tokens, scores, strict=False)
        return [self._logprob(data, token, start + place, score, top) for (data, place), token, score in parts]

    def _logprob(self, data: bytes, token: int, offset: int, score: TokenScore, top: int) -> list[Any]:
        likely = [[list(self._token_bytes.of_token(each)), value, each] for each, value in score.top[:top]]
        return [list(data), score.logprob, token, offset, likely, score.rank]


def _tokens_of(tokens: Sequence[int], scores: Sequence[TokenScore]) -> set[int]:
    """Return tokens with scores, and the most likely ones."""
    return {*(tokens if scores else ()), *(token for score in scores for token, _ in score.top)}


def _output_tokens(new: SequenceOutput) -> list[int]:
    """Return the tokens without the one that ended the text, unless stop strings are kept."""
    if new.finish is Finish.STOP and not new.asked.request.includes_stop and new.asked.request.sampling.best_of == 1:
        return new.tokens[:-1]
    return new.tokens


# ----------------------------------------------------------------------
# Requests of the model
# ----------------------------------------------------------------------

_PACE_WEIGHT: Final = 0.2
_MAX_RETRY_SECONDS: Final = 60.0
_SEEDS: Final = 2**32
# How long running sequences wait for a conversation to be rendered; most take less than a millisecond.
_RENDER_SECONDS: Final = 0.02


_EAGLE3_PROMPT_TOKENS: Final = 2


class Limits(NamedTuple):
    """Request limits."""

    tokens: int  # prompt and answer together
    answer: int | None = None  # tokens of an answer; None for as many as fit
    texts: int = 256  # concurrent sequences
    waiting: int = 256  # requests in the queue
    queue_seconds: float | None = None  # longest wait of a request, as estimated on arrival; None for no limit
    overcommit: float = 1.0  # KV-cache overcommit factor; 1.0 admits a request only if its worst case fits


class _AddedRequest(NamedTuple):
    message: int
    number: int
    request: GenerationRequest
    is_only_tokenized: bool = False


class Engine:
    """Requests of one model.

    Args:
        send_answer: sends an answer to the message of a number.
        grammars: compiles grammars.
        templates: process that renders conversations; without it ``prompts`` renders them.
        caches_prefixes: whether the pipeline has a prefix cache.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: PromptTokenizer,
        limits: Limits,
        send_answer: Callable[[int, Any], None],
        grammars: GrammarCompiler,
        *,
        templates: TemplateProcess | None = None,
        caches_prefixes: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._limits = limits
        self._answer = send_answer
        # The library continues a suspended sequence with wrong tokens if some were proposed: each has room to its end.
        overcommit = min(1.0, limits.overcommit) if pipeline.proposes else limits.overcommit
        room = BlockCapacity(pipeline.blocks, pipeline.block_tokens, limits.texts, overcommit, caches_prefixes)
        self._admission: BlockAdmission[QueuedRequest] = BlockAdmission(room, limits.waiting)
        self._batch = Batch(pipeline)
        self._grammars = GrammarQueue(grammars)
        self._renderings = None if templates is None else RenderQueue[_AddedRequest](templates)
        self._scores = TokenScorer(pipeline, limits.tokens)
        self._rows = OutputRows(self._decode, TokenBytes(pipeline.tokenizer, self._decode))
        self._unrendered: dict[int, _AddedRequest] = {}
        self._images: ImagePromptTokenizer | None = None
        if pipeline.takes_images:
            from ovmstrio.inference.engine.image_prompts import ImagePromptTokenizer  # noqa: PLC0415 - needs Pillow

            self._images = ImagePromptTokenizer(pipeline, prompts)
        self._unmeasured: deque[tuple[_AddedRequest, ImagePrompt]] = deque()
        self._requests: dict[int, QueuedRequest] = {}
        self._new_rows: list[list[Any]] = []
        self._held_rows: dict[tuple[int, int], list[list[Any]]] = {}  # of sequences to be scored, by id and index
        self._failures: list[list[Any]] = []
        self._seconds_per_request = 1.0
        self._last_end = time.monotonic()

    def _decode(self, rows: list[list[int]], skips_special_tokens: bool) -> list[str]:
        decode = self._pipeline.tokenizer.decode
        if skips_special_tokens:
            return decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]
        # The library pads shorter rows with special tokens, which would appear in the text.
        return [decode(row, skip_special_tokens=False) for row in rows]

    def detokenize(self, message: int, tokens: list[int], *, is_joined: bool) -> None:
        """Answer a message with the text of tokens, or with the text of each of them."""
        try:
            self._prompts.check_known(tokens)
            texts = self._decode([tokens], False) if is_joined else self._rows.token_texts(tokens)
            self._answer(message, [TEXTS, texts])
        except ServerError as error:
            self._answer(message, [REJECTED, encode_failure(error)])

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

    def add(self, message: int, number: int, plain: dict[str, Any], *, is_only_tokenized: bool = False) -> None:
        """Queue a request; its message is answered when the request runs or is rejected, or with its tokens."""
        try:
            request = decode_request(plain)
            waiting = self._admission.waiting if request.grammar is None else self._grammars.waiting
            if self._renderings is not None and isinstance(request.prompt, Conversation):
                waiting += self._renderings.waiting
            if waiting and (self._waiting >= self._limits.waiting or self._waits_too_long):
                raise self._overloaded()
            added = _AddedRequest(message, number, request, is_only_tokenized)
            if self._renderings is None or not isinstance(request.prompt, Conversation):
                self._add_prompt(added)
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
                self._add_prompt(added, outcome)
            except ServerError as error:
                self._answer(added.message, [REJECTED, encode_failure(error)])

    def _add_prompt(self, added: _AddedRequest, rendered: str | None = None) -> None:
        """Tokenize the prompt of a request; ``rendered`` is the text of a conversation."""
        options = self._prompt_options(added.request)
        if self._images is not None:
            if options != PromptOptions():
                message = "truncate_prompt_tokens and add_special_tokens are not supported for models with images"
                raise InvalidField(message, field="truncate_prompt_tokens", code="unsupported_parameter")
            self._unmeasured.append((added, self._images.prompt_of(added.request.prompt, rendered)))
            self._take_measured()
        elif rendered is None:
            self._add_tokens(added, self._prompts.tokenize_prompt(added.request.prompt, options))
        else:
            self._add_tokens(added, self._prompts.tokenize_rendered(rendered, options))

    def _take_measured(self) -> None:
        """Add the requests whose images are measured, in order."""
        while self._images is not None and self._unmeasured:
            added, prompt = self._unmeasured[0]
            try:
                tokens = self._images.tokenize(prompt)
                if tokens is None:
                    return
                self._add_tokens(added, tokens, prompt)
            except ServerError as error:
                self._answer(added.message, [REJECTED, encode_failure(error)])
            self._unmeasured.popleft()

    def _add_tokens(self, added: _AddedRequest, tokens: list[int], image_prompt: ImagePrompt | None = None) -> None:
        if added.is_only_tokenized:
            self._answer(added.message, [TOKENS, np.array(tokens, np.int64), np.array([len(tokens)], np.int64)])
            return
        queued = self._prepare(added, tokens)
        queued.image_prompt = image_prompt
        if queued.is_grammar_proven:
            self._take(queued)
            return
        self._requests[added.number] = queued
        self._grammars.wait(queued)
        self._compile_next()

    @property
    def _waiting(self) -> int:
        rendered = 0 if self._renderings is None else self._renderings.waiting
        return self._admission.waiting + self._grammars.waiting + rendered + len(self._unmeasured)

    @property
    def _waits_too_long(self) -> bool:
        most = self._limits.queue_seconds
        return most is not None and self._waiting * self._seconds_per_request > most

    def _overloaded(self) -> Overloaded:
        waiting = self._waiting
        seconds = min(max(1.0, waiting * self._seconds_per_request), _MAX_RETRY_SECONDS)
        limit = "max_queue" if waiting >= self._limits.waiting else "max_queue_time"
        message = f"{waiting} requests are queued already ({limit}); try again in {seconds:.0f} s"
        return Overloaded(message, retry_after_seconds=seconds)

    def _prepare(self, added: _AddedRequest, tokens: list[int]) -> QueuedRequest:
        request = added.request
        max_tokens = request.sampling.max_tokens
        self._prompts.check_length(tokens, has_answer=max_tokens != 0)
        if self._pipeline.has_eagle3_draft:
            _check_eagle3(request.sampling, len(tokens))
        most = min(value for value in (max_tokens, self._limits.answer, self._limits.tokens) if value is not None)
        seed = request.sampling.seed
        return QueuedRequest(
            id=added.number,
            message_number=added.message,
            request=request,
            prompt=tokens,
            most=min(most, self._limits.tokens - len(tokens)),
            # The generation library has seeds of 32 bits; smaller seeds are kept.
            seed=random.randrange(_SEEDS) if seed is None else (seed ^ seed >> 32) % _SEEDS,  # noqa: S311 - no secret
            is_open=max_tokens is None and self._limits.answer is None,
            is_grammar_proven=request.grammar is None,
        )

    def _prompt_options(self, request: GenerationRequest) -> PromptOptions:
        limit, max_tokens = request.prompt_limit, request.sampling.max_tokens
        if limit is not None and limit < 0:
            limit = max(1, self._limits.tokens - (1 if max_tokens is None else max_tokens))
        if limit is not None:
            limit = min(limit, self._limits.tokens + 1)
        return PromptOptions(request.adds_special_tokens, limit, request.truncates_end)

    def _take(self, queued: QueuedRequest) -> None:
        texts = max(queued.request.n, queued.request.sampling.best_of)
        proposed = self._pipeline.draft_tokens(queued.request.sampling)
        is_open = queued.is_open and not self._pipeline.proposes
        need = BlockDemand(len(queued.prompt), queued.most + proposed, texts, is_open)
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
        """Run a request; if log-probabilities of the prompt are to come first, score the prompt first."""
        request = queued.request
        queued.left = request.n
        self._check_scores(queued)
        is_scored = request.prompt_logprobs is not None or (request.echo and request.logprobs)
        if is_scored and not (request.top_logprobs or queued.prompt_scores):
            top = max(request.prompt_logprobs or 0, int(request.echo and request.logprobs))
            self._scores.begin(ScoreJob(queued, queued.prompt, top))
        elif queued.most:
            self._batch.begin(queued)
        else:
            self._emit([SequenceOutput(queued, index, [], [], Finish.LENGTH) for index in range(request.n)])
        if queued.is_grammar_proven:
            self._accept(queued)

    def _check_scores(self, queued: QueuedRequest) -> None:
        """Refuse log-probabilities that no second copy of the model can have."""
        request = queued.request
        fields = {
            "prompt_logprobs": request.prompt_logprobs is not None,
            "top_logprobs": request.top_logprobs > 0,
            "echo": request.echo and request.logprobs and queued.image_prompt is not None,
        }
        refused = [field for field, is_set in fields.items() if is_set]
        if refused and (queued.image_prompt is not None or self._pipeline.has_adapter):
            name = "echo with logprobs" if refused[0] == "echo" else refused[0]
            kind = "with a LoRA adapter" if self._pipeline.has_adapter else "that takes images"
            message = f"{name} is not supported for a model {kind}"
            raise InvalidField(message, field=refused[0], code="unsupported_parameter")

    def _take_scores(self, job: ScoreJob, outcome: list[TokenScore] | ServerError) -> None:
        """Run a request whose prompt is scored, or send the rows of a sequence that is."""
        queued = job.queued
        if isinstance(outcome, ServerError):
            self._proceed(self._begin, queued, outcome)
        elif job.index is None:
            queued.prompt_scores = outcome
            self._proceed(self._begin, queued)
        else:
            rows = self._held_rows.pop((queued.id, job.index))
            self._rows.set_scores(rows, outcome, queued.request.top_logprobs)
            if job.index == 0 and queued.request.prompt_logprobs is not None:
                first = rows[0]
                first[4] = [first[4][0] if first[4] else [], self._rows.prompt_logprobs(queued, outcome)]
            self._new_rows += rows
            self._end_sequence(queued)

    def _accept(self, queued: QueuedRequest) -> None:
        if queued.message_number:
            end = self._prompts.rendered_end(queued.request.prompt, queued.prompt)
            self._answer(queued.message_number, [ACCEPTED, len(queued.prompt), end, queued.cached, queued.own_cached])
            queued.message_number = 0

    def cancel(self, number: int) -> None:
        """Cancel a request in any state; ignored if it has ended."""
        added = self._unrendered.pop(number, None)
        if added is not None and self._renderings is not None:
            self._renderings.withdraw(added)
            self._answer(added.message, [REJECTED, encode_failure(CANCELLED)])
        for each in self._unmeasured:
            if each[0].number == number:
                self._unmeasured.remove(each)
                self._answer(each[0].message, [REJECTED, encode_failure(CANCELLED)])
                break
        queued = self._requests.get(number)
        if queued is None:
            return
        self._grammars.withdraw(queued)
        self._admission.withdraw(queued)
        reads_on = self._batch.cancel(queued)
        self._forget(queued, keeps_room=reads_on)
        if queued.message_number:
            self._answer(queued.message_number, [REJECTED, encode_failure(CANCELLED)])
            queued.message_number = 0
        self._admit()
        self._compile_next()

    def _forget(self, queued: QueuedRequest, *, has_ended: bool = False, keeps_room: bool = False) -> None:
        self._requests.pop(queued.id, None)
        self._rows.forget(queued)
        self._scores.cancel(queued)
        for index in range(queued.request.n):
            self._held_rows.pop((queued.id, index), None)
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
        cache, rebuilds of the batch, suspensions, proposed tokens, and accepted ones. RuntimeError means that the model
        is lost.
        """
        started = time.perf_counter()
        self._take_rendered()
        self._take_compiled()
        size = self._batch.running
        if self._batch.is_busy:
            self._step_batch()
        if self._images is not None:
            self._images.end_probe()
            self._take_measured()
        for job, outcome in self._scores.step():
            self._take_scores(job, outcome)
        self._admit()
        self._compile_next()
        rows, self._new_rows = self._new_rows, []
        failures, self._failures = self._failures, []
        seconds = time.perf_counter() - started
        batch = self._batch
        counts = [batch.rebuilds, batch.suspensions, batch.proposed, batch.accepted]
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
        while news:
            news, rests = _split_for_stop_strings(news)
            rows = self._rows.make(news)
            for new, row in zip(news, rows, strict=True):
                queued = new.asked
                queued.generated += len(new.tokens)
                # The most likely tokens of a text are found after its end.
                held = self._held_rows.setdefault((queued.id, new.index), []) if queued.request.top_logprobs else None
                (self._new_rows if held is None else held).append(row)
                if row[-1] is None:
                    continue
                rests.pop((queued.id, new.index), None)
                if new.finish is None:
                    self._batch.end(queued, new.index)
                if held is None:
                    self._end_sequence(queued)
                else:
                    self._score_sequence(queued, new.index, held)
            news = list(rests.values())

    def _score_sequence(self, queued: QueuedRequest, index: int, rows: Sequence[list[Any]]) -> None:
        request = queued.request
        made = [each[2] for row in rows if row[4] is not None for each in row[4][0]]
        tokens = queued.prompt + made[len(queued.prompt) if request.echo else 0 :]
        self._scores.begin(ScoreJob(queued, tokens, max(request.top_logprobs, request.prompt_logprobs or 0), index))

    def _end_sequence(self, queued: QueuedRequest) -> None:
        queued.left -= 1
        if not queued.left:
            self._forget(queued, has_ended=True)


def _check_eagle3(sampling: Sampling, prompt_tokens: int) -> None:
    if sampling.assistant_confidence_threshold is not None:
        message = (
            "assistant_confidence_threshold is not supported with an EAGLE-3 draft model; use num_assistant_tokens"
        )
        raise InvalidField(message, field="assistant_confidence_threshold", code="unsupported_parameter")
    if prompt_tokens < _EAGLE3_PROMPT_TOKENS:
        raise InvalidRequest("the prompt has 1 token, expected at least 2 with an EAGLE-3 draft model")


def _split_for_stop_strings(
    news: list[SequenceOutput],
) -> tuple[list[SequenceOutput], dict[tuple[int, int], SequenceOutput]]:
    """Return outputs of one token where a stop string may end the text before the last one, and the rests of these.

    A step that accepts proposed tokens may have tokens after the stop string, which are no part of the text.
    """
    rests: dict[tuple[int, int], SequenceOutput] = {}
    if not any(len(new.tokens) > 1 and new.asked.request.stop for new in news):
        return news, rests
    heads = []
    for new in news:
        head = new
        if len(new.tokens) > 1 and new.asked.request.stop and new.asked.request.sampling.best_of == 1:
            head = replace(new, tokens=new.tokens[:1], logprobs=new.logprobs[:1], finish=None)
            rests[new.asked.id, new.index] = replace(new, tokens=new.tokens[1:], logprobs=new.logprobs[1:])
        heads.append(head)
    return heads, rests


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


# ----------------------------------------------------------------------
# Main loop of the process
# ----------------------------------------------------------------------

_CANCEL: Final = "cancel"
_UNSOLICITED: Final = 0  # number of messages that are no answer, or need none
_RECEIVE_SECONDS: Final = 0.05  # time limit for receiving messages between two steps


class EngineProgram:
    """Serves one channel."""

    def __init__(self, channel: BlockingChannel, engine: Engine, tokenizing: TokenizeQueue) -> None:
        self._channel = channel
        self._engine = engine
        self._tokenizing = tokenizing
        self._pending: deque[Message | None] = deque()
        self._cancelled: set[int] = set()

    def run(self) -> None:
        """Serve until the server closes its side."""
        while self._take_messages():
            if self._engine.is_busy:
                self._send_step(self._engine.step())
            self._tokenizing.go_on()

    def _send_step(self, frame: list[Any]) -> None:
        # Log-probabilities may be infinite, which is no JSON.
        has_logprobs = any(logprobs for _, _, _, _, logprobs, _ in frame[0])
        send = self._channel.send if has_logprobs else self._channel.send_json
        send([_UNSOLICITED, frame])

    @property
    def _is_busy(self) -> bool:
        return self._engine.is_busy or self._tokenizing.is_busy

    def _take_messages(self) -> bool:
        started = time.monotonic()
        while True:
            self._read_ahead()
            if not self._pending:
                if self._is_busy:
                    return True
                self._channel.wait(self._engine.descriptors, self._engine.seconds_left)
                continue
            message = self._pending.popleft()
            if message is None:
                return False
            self._take(*message.value)
            if self._is_busy and time.monotonic() - started > _RECEIVE_SECONDS:
                return True

    def _read_ahead(self) -> None:
        """Receive pending messages, so that requests cancelled among them cause no work."""
        while not (self._pending and self._pending[-1] is None) and self._channel.has_message():
            message = self._channel.receive()
            self._pending.append(message)
            if message is not None and message.value[1][0] == _CANCEL:
                self._cancelled.add(message.value[1][1])

    def _take(self, number: int, value: list[Any]) -> None:
        kind, request, *parts = value
        if kind == _CANCEL:
            self._cancelled.discard(request)
            self._tokenizing.cancel(request)
            self._engine.cancel(request)
        elif request in self._cancelled:
            self._channel.send([number, [REJECTED, encode_failure(CANCELLED)]])
        elif kind == "tokenize":
            self._tokenizing.add(number, request, *parts)
        elif kind == "detokenize":
            _, tokens, is_joined = parts
            self._engine.detokenize(number, tokens, is_joined=is_joined)
        elif kind == "tokenize prompt":
            self._engine.add(number, request, *parts, is_only_tokenized=True)
        else:
            self._engine.add(number, request, *parts)


def _load(options: dict[str, Any], answer: Callable[[int, Any], None]) -> tuple[Engine, TokenizeQueue, dict[str, Any]]:
    pipeline = Pipeline(PipelineOptions(**options["pipeline"]))
    folder = Path(options["pipeline"]["folder"])
    room = (pipeline.blocks - pipeline.proposes) * pipeline.block_tokens
    known, source = context_length(folder)
    if options["max_model_len"] is not None:
        known, source = options["max_model_len"], "option"
    most, source = (room, "cache_size") if known is None or known > room else (known, source)
    bound = find_token_bound(pipeline.tokenizer, most)
    if bound is not None:
        # A prompt that fills the bound may have been cut.
        most, source = bound - 1, TOKENIZER_FILE
    limits = Limits(most, **options["limits"])
    renderer = choose_renderer(pipeline, folder, options["template_mode"])
    prompts = PromptTokenizer(pipeline.tokenizer, renderer.render, limits.tokens)
    engine = Engine(
        pipeline,
        prompts,
        limits,
        answer,
        GrammarCompiler(pipeline, folder),
        templates=renderer.process,
        caches_prefixes=options["pipeline"]["caches_prefixes"],
    )
    facts = {
        "context_length": limits.tokens,
        "context_source": source,
        "token_bound": bound,
        "vocabulary_size": prompts.vocabulary_size,
        "longest_token": prompts.longest_token,
        "blocks": pipeline.blocks,
        "block_tokens": pipeline.block_tokens,
        "chat_template": renderer.source,
        "chat_template_file": renderer.file,
        "takes_images": pipeline.takes_images,
        "architectures": read_architectures(folder),
    }
    return engine, TokenizeQueue(prompts.tokenize_all, answer), facts


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Run an engine for the model named in the first message."""

    def answer(message: int, value: Any) -> None:
        if message != _UNSOLICITED:
            channel.send([message, value])

    try:
        engine, tokenizing, facts = _load(options, answer)
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    channel.send([number, [LOADED, facts]])
    EngineProgram(channel, engine, tokenizing).run()
