"""Continuous batch of running sequences, with recovery after a failed step, and admission by KV-cache blocks."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from openvino_genai.py_openvino_genai import GenerationFinishReason, GenerationStatus

from ovmstrio.core.errors import InvalidField, InvalidRequest, ModelFailure, ServerError
from ovmstrio.core.generation import Finish, Sampling
from ovmstrio.inference.engine.messages import GRAMMAR_FIELD
from ovmstrio.inference.engine.pipeline import (
    configure_generation,
    has_output_penalty,
    library_error_message,
    takes_best_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.inference.engine.pipeline import ImagePrompt, Pipeline

# ----------------------------------------------------------------------
# Running sequences: sampling configuration, state, output, and restart after a batch rebuild
# ----------------------------------------------------------------------

_FINISH_REASONS: Final = {
    GenerationFinishReason.STOP: Finish.STOP,
    GenerationFinishReason.TOOL_CALL: Finish.STOP,
    GenerationFinishReason.LENGTH: Finish.LENGTH,
}
_SEEDS: Final = 2**32
_GREEDY: Final = Sampling(temperature=0)


class SequenceDivergedError(Exception):
    """A restarted sequence produced different tokens."""

    def __init__(self) -> None:
        super().__init__("the model failed and could not continue the same text")


class CacheFullError(Exception):
    """The KV cache is too small for a single sequence."""

    def __init__(self) -> None:
        super().__init__("the KV cache has no room for this text")


class TokenScore(NamedTuple):
    """Log-probability of a token, None without context, its rank from 1, and the most likely tokens at its place.

    ``rank`` is 0 and ``top`` empty if they are unknown.
    """

    logprob: float | None
    rank: int = 0
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request ready to run.

    Attributes:
        prompt_scores: scores of the prompt's tokens; empty unless requested.
    """

    id: int  # the server's request number
    message_number: int  # number of the message to answer when the request runs; 0 once answered
    request: GenerationRequest
    prompt: list[int]  # its tokens; negative numbers stand for those of images
    most: int  # maximum tokens per sequence
    seed: int
    is_open: bool = False  # whether the request has no token limit
    is_grammar_proven: bool = True  # whether its grammar, if any, is known to work
    image_prompt: ImagePrompt | None = None  # the prompt for a pipeline that takes images
    prompt_scores: list[TokenScore] = field(default_factory=list)
    left: int = 0  # number of sequences that have not ended
    generated: int = 0  # number of generated tokens
    cached: int = 0  # number of prompt tokens found in the prefix cache, as far as known
    own_cached: int = 0  # number of them that requests with the same salt have used
    takes_best_tokens: bool = False  # whether each generated token is the most likely one, once it runs


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence, and its finish reason if it has ended."""

    asked: QueuedRequest
    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None


class RunningSequence:
    """One sequence of a request, or all of them for beam search.

    Attributes:
        is_settled: has had two tokens since the start, so that the library has hashed its last block completely.
        chunk_end: number of prompt tokens that earlier steps have left in the prefix cache, a multiple of the block.
        planned_tokens: number of prompt tokens to process from the start on.
    """

    def __init__(self, queued: QueuedRequest, index: int = 0) -> None:
        self.asked = queued
        self.index = index
        self.handle: Any = None  # the library's handle, None before the start; dropping it ends the sequence
        self.is_new = False  # started, no step since
        self.is_reading = False  # in prefill
        self.is_settled = False
        self.is_chunk = False  # the handle is of a part of the prompt; None once a step has processed it
        self.is_leaving = False  # cancelled, but finishing its prefill
        self.is_suspect = False  # was new, with others, in a step that failed, and has not run since
        self.is_restarted = False  # restarted after a failed step
        self.is_first = False  # received its first token in the last step
        self.draft_tokens = 0  # number of proposed tokens per step, if known
        self.proposed = 0  # number of tokens proposed in the last step
        self.accepted = 0  # number of these that the model accepted
        self.is_newly_suspended = False  # left out of the last step, but not of the one before
        self.chunk_end = 0
        self.planned_tokens = 0
        self._has_output_penalty = False
        self._is_suspended = False
        self._prompt_tokens_left = 0
        self._tokens: list[int] = []
        self._sent_tokens: list[int] = []

    @property
    def has_beams(self) -> bool:
        """Return whether this is a beam search, whose tokens come at its end."""
        return self.asked.request.sampling.best_of > 1

    @property
    def is_unread(self) -> bool:
        """True if a part of the prompt is not processed."""
        return self.handle is None or self.is_reading

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return len(self.asked.prompt) + len(self._tokens)

    @property
    def pending_tokens(self) -> list[int]:
        """Tokens to process before the next one is generated."""
        return self.asked.prompt + self._tokens

    @property
    def computed(self) -> list[int]:
        """Tokens whose keys and values are certainly computed: all but the last, once one was generated."""
        return self.asked.prompt + self._tokens[:-1] if self._tokens else []

    def ends_within(self, tokens: Sequence[int], block_tokens: int) -> bool:
        """Return whether ``tokens`` begin with all tokens of this sequence and its last block is not full."""
        if self.handle is None:
            return False
        prompt = self.asked.prompt
        length = max(len(prompt), self.length - 1)
        if not length % block_tokens or length > len(tokens) or prompt != tokens[: len(prompt)]:
            return False
        return self._tokens[: length - len(prompt)] == tokens[len(prompt) : length]

    def start(self, pipeline: Pipeline, number: int) -> None:
        """Start or restart the sequence from its present tokens; RuntimeError if the parameters are rejected."""
        queued, request = self.asked, self.asked.request
        made = len(self._tokens)
        sampling = request.sampling
        seed = (queued.seed + self.index + made) % _SEEDS
        config = configure_generation(
            pipeline.defaults(), sampling, texts=request.n, seed=seed, grammar=request.grammar
        )
        config.max_new_tokens = queued.most - made
        least = pipeline.min_tokens if sampling.min_tokens is None else sampling.min_tokens
        config.min_new_tokens = min(max(least - made, 0), queued.most - made)
        config.logprobs = int(request.logprobs)
        queued.takes_best_tokens = takes_best_tokens(config)
        self._has_output_penalty = has_output_penalty(config)
        self.draft_tokens = pipeline.draft_tokens(sampling)
        self.is_new = self.is_reading = True
        self.is_settled = self.is_chunk = False
        self._prompt_tokens_left = len(self.pending_tokens) - self.chunk_end
        self.handle = pipeline.add(number, queued.image_prompt or self.pending_tokens, config)

    def start_chunk(self, pipeline: Pipeline, number: int, end: int) -> None:
        """Process the prompt up to ``end`` in one step, as a request of its own whose token is dropped."""
        config = configure_generation(pipeline.defaults(), _GREEDY)
        config.max_new_tokens = 1
        self.is_new = self.is_reading = self.is_chunk = True
        self.chunk_end = end
        self.handle = pipeline.add(number, self.pending_tokens[:end], config)

    def rewind(self) -> None:
        """Discard generated tokens before a restart if penalties, a grammar or images depend on them."""
        asked = self.asked
        if asked.request.grammar is not None or asked.image_prompt is not None or self._has_output_penalty:
            # A previous restart may not have reached all tokens already sent; keep the rest for comparison.
            self._sent_tokens, self._tokens = self._tokens + self._sent_tokens, []

    def read(self) -> list[SequenceOutput]:
        """Return the output of the last step.

        Raises:
            SequenceDivergedError: a restarted sequence differs from the tokens already sent.
            CacheFullError: the KV cache has no room for it.
        """
        # Reading without data would block forever.
        has_come, was_reading = self.handle.can_read(), self.is_reading
        self._record_step(has_come=has_come)
        if not has_come:
            if self.handle.get_status() == GenerationStatus.IGNORED:
                raise CacheFullError
            return []
        if self.is_chunk:
            while self.handle.can_read():
                self.handle.read()
            self.handle, self.is_first = None, False
            return []
        if self.has_beams:
            return self._read_beams()
        tokens: list[int] = []
        logprobs: list[float] = []
        finish = None
        while self.handle.can_read():
            for output in self.handle.read().values():
                tokens += output.generated_ids
                logprobs += output.generated_log_probs
                finish = _FINISH_REASONS.get(output.finish_reason, finish)
        proposed = 0 if was_reading else min(self.draft_tokens, self.asked.most - len(self._tokens) - 1)
        self.proposed, self.accepted = proposed, min(proposed, max(0, len(tokens) - 1))
        self._tokens += tokens
        sent = min(len(self._sent_tokens), len(tokens))
        if self._sent_tokens[:sent] != tokens[:sent]:
            raise SequenceDivergedError
        del self._sent_tokens[:sent]
        if sent == len(tokens) and finish is None:
            return []
        return [SequenceOutput(self.asked, self.index, tokens[sent:], logprobs[sent:], finish)]

    def _record_step(self, *, has_come: bool) -> None:
        """Record whether the step produced a token; a running sequence gets one per step unless the cache is full."""
        self.proposed = self.accepted = 0
        has_begun = bool(self._tokens) and not self.is_new
        self.is_first = has_come and not self._tokens
        self.is_settled = self.is_settled or (has_come and not self.is_reading)
        self.is_reading = self.is_reading and not has_come
        self.is_newly_suspended = has_begun and not has_come and not self._is_suspended
        self._is_suspended = has_begun and not has_come

    def record_prefill(self, limit: int) -> int:
        """Record at least how many prompt tokens of a beam search a step has processed, at most ``limit``."""
        taken = min(limit, self._prompt_tokens_left)
        self._prompt_tokens_left -= taken
        self.is_reading = self._prompt_tokens_left > 0
        return taken

    def _read_beams(self) -> list[SequenceOutput]:
        best = sorted(self.handle.read().values(), key=lambda output: output.score, reverse=True)
        return [
            SequenceOutput(
                self.asked,
                index,
                list(output.generated_ids),
                list(output.generated_log_probs),
                _FINISH_REASONS.get(output.finish_reason, Finish.STOP),
            )
            for index, output in enumerate(best[: self.asked.request.n])
        ]

    def cancel(self) -> None:
        """Remove the sequence from the batch at the next step."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None
        self.is_new = self.is_reading = False
        self.chunk_end = 0


# ----------------------------------------------------------------------
# Prefill scheduling around the prefix cache of OpenVINO GenAI
# ----------------------------------------------------------------------

# Two sequences that get the same partial block both write into it and produce wrong output. Two sequences with the same
# uncached prefix would both compute it, so the second waits for the first.


def block_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the end and the chained hash of each block of a sequence; the last block may be partial."""
    key = 0
    for start in range(0, len(tokens), block_tokens):
        block = tokens[start : start + block_tokens]
        key = hash((key, *block))
        yield start + len(block), key


_MAX_SALTS: Final = 64  # salts remembered per block; older salts are reported as uncached


class PrefixCacheModel:
    """Estimate of the prefix cache: blocks available to later prompts; ``blocks`` is the capacity, 0 for no cache.

    The library shares blocks among all requests.  The model also records the salts of the requests that used a block,
    so that usage reports reveal nothing about prompts of others.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._most = blocks
        self._block = block_tokens
        self._known: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def find(self, tokens: Sequence[int], salt: str = "") -> tuple[int, int]:
        """Return the number of cached tokens of a new prompt: all, and those in blocks used with ``salt``.

        The last token is always computed.
        """
        if not self._most:
            return 0, 0
        found, own, before, is_own = 0, 0, 0, True
        for end, key in block_keys(tokens, self._block):
            salts = self._known.get(key)
            if salts is None:
                part, salts = self._find_part(before, tokens[found : found + self._block])
                found += part
                own = found if is_own and salt in salts else own
                break
            self._known.move_to_end(key)
            found, before, is_own = end, key, is_own and salt in salts
            own = end if is_own else own
        return min(found, len(tokens) - 1), min(own, len(tokens) - 1)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether all blocks of a sequence are cached, the last one included."""
        return all(key in self._known for _, key in block_keys(tokens, self._block))

    def _find_part(self, before: int, tokens: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """Find a partial block, which then belongs to the new sequence; return its tokens and salts."""
        for number in range(1, min(len(tokens) + 1, self._block)):
            key = hash((before, *tokens[:number]))
            if key in self._known:
                return number, self._known.pop(key)
        return 0, ()

    def keep(self, tokens: Sequence[int], salt: str = "", *, is_whole: bool = True) -> None:
        """Add computed blocks; of a running sequence (``is_whole`` is false) the full ones only."""
        if not self._most:
            return
        for end, key in block_keys(tokens, self._block):
            if not is_whole and end % self._block:
                continue
            salts = self._known.get(key, ())
            if salt not in salts:
                self._known[key] = (*salts[1 - _MAX_SALTS :], salt)
                if len(self._known) > self._most:
                    self._known.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries after a rebuild of the batch."""
        self._known.clear()


class PartialBlocks:
    """LRU set of positions inside a block at which finished sequences ended; at most ``limit``."""

    def __init__(self, limit: int, block_tokens: int) -> None:
        self._most = limit
        self._block = block_tokens
        self._ends: OrderedDict[tuple[int, tuple[int, ...]], None] = OrderedDict()
        self._heads: Counter[int] = Counter()

    def note(self, tokens: Sequence[int]) -> None:
        """Record the end of a sequence, unless it is a block boundary."""
        full = len(tokens) - len(tokens) % self._block
        if full == len(tokens):
            return
        *_, (_, head) = (0, 0), *block_keys(tokens[:full], self._block)
        end = head, tuple(tokens[full:])
        if end not in self._ends:
            self._heads[head] += 1
        self._ends[end] = None
        self._ends.move_to_end(end)
        if len(self._ends) > self._most:
            (head, _), _ = self._ends.popitem(last=False)
            self._heads[head] -= 1
            if not self._heads[head]:
                del self._heads[head]

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the positions in a prompt at which an earlier sequence ended."""
        start, head = 0, 0
        for stop, key in block_keys(tokens, self._block):
            if head in self._heads:
                for after in range(start + 1, min(stop + 1, start + self._block)):
                    end = head, tuple(tokens[start:after])
                    if end in self._ends:
                        self._ends.move_to_end(end)
                        yield after
            start, head = stop, key

    def clear(self) -> None:
        """Forget everything, after a rebuild of the batch."""
        self._ends.clear()
        self._heads.clear()


# Ends remembered beyond the number of blocks, as blocks are not evicted in the order in which sequences end.
_EXTRA_ENDS: Final = 512


class PrefillScheduler:
    """Decides which prompts may be in prefill at the same time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.caches = pipeline.caches_prefixes
        self._block = pipeline.block_tokens
        self._prefixes = PrefixCacheModel(pipeline.blocks if self.caches else 0, self._block)
        self._ends = PartialBlocks(pipeline.blocks + _EXTRA_ENDS, self._block)

    def may_start(self, tokens: Sequence[int], running: Collection[RunningSequence]) -> bool:
        """Return whether prefill of a prompt may start in the next step."""
        if not self.caches:
            return True
        reading = self._most_shared(tokens, (text for text in running if text.is_reading))
        if not self._prefixes.holds(tokens[: reading - reading % self._block]):
            return False
        begin = tokens[: self._most_shared(tokens, (text for text in running if not text.is_settled))]
        if any(self._ends.find(begin)):
            return False
        # Sequences that start in one step look up the cache before any of them is computed: their last blocks differ.
        return not any(text.ends_within(begin, self._block) for text in running if not text.is_new)

    def _most_shared(self, tokens: Sequence[int], texts: Iterable[RunningSequence]) -> int:
        return max(
            (_common(tokens, each.pending_tokens, self._block) for each in texts if each.handle is not None), default=0
        )

    def begin(self, tokens: Sequence[int], salt: str) -> tuple[int, int]:
        """Return the numbers of cached tokens of a prompt that starts now; see :meth:`PrefixCacheModel.find`."""
        return self._prefixes.find(tokens, salt)

    def go_on(self, tokens: Sequence[int], salt: str) -> None:
        """Record the computed tokens of a running sequence."""
        self._prefixes.keep(tokens, salt, is_whole=False)

    def end(self, tokens: Sequence[int], salt: str) -> None:
        """Record the computed tokens of a sequence that has left the batch."""
        if self.caches:
            self._prefixes.keep(tokens, salt)
            self._ends.note(tokens)

    def record_beam_end(self, prompt: Sequence[int]) -> None:
        """Record the end of a beam search, whose beams share the prompt (or all but its last token)."""
        if self.caches:
            self._ends.note(prompt if len(prompt) % self._block else prompt[:-1])

    def clear(self) -> None:
        """Forget everything, after a rebuild of the batch."""
        self._prefixes.clear()
        self._ends.clear()


def _common(one: Sequence[int], other: Sequence[int], step: int) -> int:
    most = min(len(one), len(other))
    for start in range(0, most, step):
        if one[start : start + step] != other[start : start + step]:
            ends = zip(one[start:most], other[start:most], strict=True)
            return start + next((place for place, (left, right) in enumerate(ends) if left != right), most - start)
    return most


# ----------------------------------------------------------------------
# Batch, with recovery after a failed step, and admission by KV-cache blocks
# ----------------------------------------------------------------------


@dataclass(slots=True)
class StepOutcome:
    """Result of a step; ``left`` are requests cancelled during prefill that have now left the batch."""

    news: list[SequenceOutput] = field(default_factory=list)
    failed: list[tuple[QueuedRequest, ServerError]] = field(default_factory=list)
    newly_proven: list[QueuedRequest] = field(default_factory=list)  # requests whose grammar is now known to work
    left: list[QueuedRequest] = field(default_factory=list)


_STEP_SECONDS: Final = 0.3  # how long the prompts of a step may delay the running sequences, as far as known
_PREFILL_TOKENS: Final = 32
"""Tokens of a step that proposals leave to prompts."""


class Batch:
    """Running sequences of a pipeline.

    With a prefix cache, a long prompt is started in chunks of whole blocks, each of which a step completes.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._prefill = PrefillScheduler(pipeline)
        self._numbers = itertools.count(1)
        self._sequences: dict[int, RunningSequence] = {}
        self._block = pipeline.block_tokens
        self._step_tokens = pipeline.batched_tokens  # maximum of prompt tokens, so that a step is short
        self._is_overtaken = False  # whether newcomers took the room of the oldest started prompt in the last step
        self.rebuilds = 0  # number of times the pipeline was recreated
        self.suspensions = 0  # number of times a sequence was left out of a step because the KV cache was full
        self.proposed = 0  # number of tokens that a draft model or prompt lookup proposed
        self.accepted = 0  # number of proposed tokens that the model accepted

    @property
    def is_busy(self) -> bool:
        """Return whether a step has work, including the release of blocks of cancelled sequences."""
        return bool(self._sequences) or self._pipeline.is_busy

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._sequences)

    @property
    def has_unproven_grammar(self) -> bool:
        """Return whether a sequence has a grammar that is not known to work."""
        return any(not text.asked.is_grammar_proven for text in self._sequences.values())

    @property
    def is_compiling_grammar(self) -> bool:
        """Return whether a sequence with a grammar has not received its first token."""
        return any(
            text.asked.request.grammar is not None and (text.handle is None or text.is_reading)
            for text in self._sequences.values()
        )

    def takes(self, queued: QueuedRequest) -> bool:
        """Return whether a new request can join the next step."""
        texts = self._sequences.values()
        if not self._has_started_all() or self._free_prompt_tokens(is_newcomer=True) < min(
            len(queued.prompt), self._block
        ):
            return False
        return self._prefill.may_start(queued.prompt, texts)

    @property
    def used(self) -> float:
        """Fraction of the KV cache that the sequences fill, ignoring shared blocks."""
        block = self._pipeline.block_tokens
        return min(1.0, sum(-(-text.length // block) for text in self._sequences.values()) / self._pipeline.blocks)

    def begin(self, queued: QueuedRequest) -> None:
        """Add the sequences of a request, once prefill allows; raise InvalidRequest if the parameters are rejected."""
        first = RunningSequence(queued)
        texts = [
            first,
            *(RunningSequence(queued, index) for index in range(1, 1 if first.has_beams else queued.request.n)),
        ]
        queued.left = queued.request.n
        try:
            for text in texts:
                self._start(text)
        except (RuntimeError, TypeError, ValueError) as error:
            self.cancel(queued)
            raise _rejection(error) from error

    def _start(self, text: RunningSequence) -> None:
        number = next(self._numbers)
        if self._has_started_all() and self._may_start(text):
            self._start_now(text, self._free_prompt_tokens(is_newcomer=True))
        self._sequences[number] = text

    def _has_started_all(self) -> bool:
        """Return whether no sequence waits for its first start."""
        return all(text.handle is not None or text.chunk_end for text in self._sequences.values())

    def _free_prompt_tokens(self, *, is_newcomer: bool = False) -> int:
        """Return the number of prompt tokens that the next step can process in addition to started prompts.

        A newcomer leaves half of them to a prompt that was started before; the other half lets it overtake. Half of a
        step of one block is none: such steps are for newcomers and for the oldest started prompt in turn.
        """
        if not self._prefill.caches:
            return self._pipeline.batched_tokens
        decoding = reading = 0
        has_chunk = False
        for text in self._sequences.values():
            if text.handle is None:
                has_chunk = has_chunk or text.chunk_end > 0
            elif text.is_reading:
                reading += text.planned_tokens
            else:
                decoding += text.asked.request.sampling.best_of
        room = min(self._pipeline.batched_tokens - decoding, self._step_tokens)
        # Many decoding sequences must not keep prompts out.
        if is_newcomer and has_chunk:
            return (0 if self._is_overtaken else max(room // 2, self._block)) - reading
        return max(room, self._block) - reading

    def _may_start(self, text: RunningSequence) -> bool:
        """Return whether a sequence may start; a suspect of a failed step starts alone."""
        others = self._sequences.values()
        if text.is_suspect and any(each.is_new for each in others):
            return False
        return self._fits_step(text) and self._prefill.may_start(text.pending_tokens, others)

    def _fits_step(self, text: RunningSequence) -> bool:
        """Return whether a step has room for all proposals, or, with a draft model, for all new prompts.

        The library produces wrong tokens or fails if it processes the proposals of a sequence in parts, and also if it
        reads a prompt in parts with a draft model.
        """
        pipeline = self._pipeline
        if not pipeline.proposes:
            return True
        others = [each for each in self._sequences.values() if each.handle is not None]
        if pipeline.has_draft:
            lengths = [len(each.pending_tokens) for each in others if each.is_new]
            return not lengths or sum(lengths) + len(text.pending_tokens) <= pipeline.batched_tokens
        checked = pipeline.draft_tokens(text.asked.request.sampling) + sum(each.draft_tokens + 1 for each in others) + 1
        return not others or checked <= pipeline.batched_tokens - _PREFILL_TOKENS

    def _start_now(self, text: RunningSequence, room: int) -> None:
        """Start a sequence, or the next chunk of a prompt that does not fit into a step; nothing without room.

        A chunk ends with a block, where a cancelled sequence can leave: the library would reuse a part as a full block.
        """
        text.rewind()
        tokens, cached, own = text.pending_tokens, text.chunk_end, 0
        is_divisible = self._prefill.caches and text.asked.image_prompt is None
        if is_divisible and room < min(len(tokens) - cached, self._block):
            return
        if not cached:
            cached, own = self._prefill.begin(tokens, text.asked.request.cache_salt)
        end = (cached + room) // self._block * self._block
        text.planned_tokens = min(end, len(tokens)) - cached
        is_first = not text.chunk_end
        if is_divisible and cached + room < len(tokens):
            text.start_chunk(self._pipeline, next(self._numbers), end)
        else:
            text.planned_tokens = len(tokens) - cached
            text.start(self._pipeline, next(self._numbers))
        if text.index == 0 and is_first and not text.is_restarted:
            text.asked.cached, text.asked.own_cached = cached, own

    def _start_queued(self, outcome: StepOutcome) -> None:
        for number, text in list(self._sequences.items()):
            if text.handle is not None or number not in self._sequences:
                continue
            if not self._may_start(text):
                return
            try:
                self._start_now(text, self._free_prompt_tokens())
            except (RuntimeError, TypeError, ValueError) as error:
                self._fail(text.asked, _rejection(error), outcome)
                self.cancel(text.asked)

    def cancel(self, queued: QueuedRequest) -> bool:
        """Remove the sequences of a request; return whether some must finish prefill, see :attr:`StepOutcome.left`."""
        self._drop(number for number, text in self._sequences.items() if text.asked is queued)
        return any(text.asked is queued for text in self._sequences.values())

    def end(self, queued: QueuedRequest, index: int) -> None:
        """Remove one sequence at the next step, if it has not ended."""
        self._drop(number for number, text in self._sequences.items() if text.asked is queued and text.index == index)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            text = self._sequences[number]
            # The library would reuse a partially computed block as a full one for another request of the same prompt.
            text.is_leaving = self._prefill.caches and text.is_reading and not text.is_new
            if not text.is_leaving:
                self._remove(number).cancel()

    def _remove(self, number: int) -> RunningSequence:
        text = self._sequences.pop(number)
        if text.has_beams:
            self._prefill.record_beam_end(text.asked.prompt)
        else:
            self._prefill.end(text.computed, text.asked.request.cache_salt)
        return text

    def step(self) -> StepOutcome:
        """Generate the next token of each sequence; raise RuntimeError if a failed pipeline cannot be recreated."""
        outcome = StepOutcome()
        reason = ""
        self._start_queued(outcome)
        oldest = next((text for text in self._sequences.values() if text.chunk_end and text.is_unread), None)
        self._is_overtaken = oldest is not None and oldest.handle is None
        started = time.perf_counter()
        try:
            self._pipeline.step()
        except RuntimeError as error:
            reason = library_error_message(error)
        stepped = [text for text in self._sequences.values() if text.handle is not None]
        self._limit_step(sum(text.planned_tokens for text in stepped if text.is_new), time.perf_counter() - started)
        if not reason:
            self._follow_beams(stepped)
        self._read(outcome)
        if reason:
            self._recover(reason, outcome)
            return outcome
        failed = {id(queued) for queued, _ in outcome.failed}
        for text in stepped:
            text.is_new = text.is_suspect = False
            if not text.asked.is_grammar_proven and not text.is_chunk and id(text.asked) not in failed:
                text.asked.is_grammar_proven = True
                outcome.newly_proven.append(text.asked)
        return outcome

    def _limit_step(self, tokens: int, seconds: float) -> None:
        """Limit the prompt tokens of later steps by the time that a step has taken, to a multiple of the block."""
        if not tokens or seconds <= 0:
            return
        most = round(tokens * _STEP_SECONDS / seconds) // self._block * self._block
        # A slow step may have other causes, so the limit falls and grows by at most half and double. With few tokens,
        # most of the time is what any step takes.
        least = max(self._step_tokens // 2, self._block) if tokens >= self._block else self._step_tokens
        self._step_tokens = min(max(most, least), 2 * self._step_tokens, self._pipeline.batched_tokens)

    def _follow_beams(self, stepped: list[RunningSequence]) -> None:
        """Track the prefill of beam sequences; the library reports only their end.

        The library processes prompts in order of arrival, with the step's token budget that decoding leaves.
        """
        room = self._pipeline.batched_tokens
        readers = [text for text in stepped if text.is_reading and not text.is_chunk]
        for text in stepped:
            if text.is_chunk:
                room -= text.planned_tokens
            elif not text.is_reading:
                room -= text.asked.request.sampling.best_of
                text.is_settled = text.is_settled or text.has_beams
        for text in readers:
            if not text.has_beams or room <= 0:
                return
            room -= text.record_prefill(room)
            if not text.is_reading:
                self._prefill.go_on(text.asked.prompt, text.asked.request.cache_salt)

    def _read(self, outcome: StepOutcome) -> None:
        over = [
            number
            for number, text in self._sequences.items()
            if text.handle is not None and self._read_text(text, outcome)
        ]
        for text in [self._remove(number) for number in over]:
            if text.is_leaving:
                text.cancel()
                outcome.left.append(text.asked)
        for queued, _ in outcome.failed:
            self.cancel(queued)

    def _read_text(self, text: RunningSequence, outcome: StepOutcome) -> bool:
        try:
            news = text.read()
        except (SequenceDivergedError, CacheFullError) as error:
            if not text.is_leaving:
                self._fail(text.asked, ModelFailure(str(error)), outcome)
            return text.is_leaving
        self.suspensions += text.is_newly_suspended
        self.proposed += text.proposed
        self.accepted += text.accepted
        salt = text.asked.request.cache_salt
        if text.handle is None:
            self._prefill.go_on(text.pending_tokens[: text.chunk_end], salt)
        elif text.is_first:
            self._prefill.go_on(text.computed, salt)
        if text.is_leaving:
            return not text.is_reading
        outcome.news += news
        return bool(news) and news[-1].finish is not None

    def _fail(self, queued: QueuedRequest, error: ServerError, outcome: StepOutcome) -> None:
        if all(each is not queued for each, _ in outcome.failed):
            outcome.failed.append((queued, error))

    def _recover(self, reason: str, outcome: StepOutcome) -> None:
        """Recreate the pipeline and restart the sequences that did not cause the failure; may raise RuntimeError."""
        print(f"step failed, batch rebuilt: {reason}", file=sys.stderr)  # noqa: T201 - the server logs it
        self.rebuilds += 1
        texts = list(self._sequences.values())
        newcomers = {id(text.asked): text.asked for text in texts if text.is_new and not text.is_restarted}
        culprits = self._failed_requests(texts, list(newcomers.values()), reason)
        for queued, error in culprits:
            self._fail(queued, error, outcome)
        blamed = [queued for queued, _ in outcome.failed]
        for text in texts:
            text.cancel()
        self._sequences.clear()
        self._pipeline.rebuild()
        self._prefill.clear()
        for text in texts:
            if text.is_leaving:
                outcome.left.append(text.asked)
            elif all(queued is not text.asked for queued in blamed):
                text.is_suspect = text.is_suspect or (not culprits and id(text.asked) in newcomers)
                text.is_restarted = not text.is_suspect
                self._start(text)

    def _failed_requests(
        self, texts: list[RunningSequence], newcomers: list[QueuedRequest], reason: str
    ) -> list[tuple[QueuedRequest, ServerError]]:
        """Return the failed requests: one with an unproven grammar, else the only new one, else all restarted ones.

        With several new requests, each is first restarted alone to find the failing one.
        """
        unproven = [text.asked for text in texts if not text.asked.is_grammar_proven]
        if unproven:
            why = f"{GRAMMAR_FIELD}: {reason}"
            return [(unproven[0], InvalidField(why, field=GRAMMAR_FIELD, code="invalid_grammar"))]
        if newcomers:
            blamed = newcomers if len(newcomers) == 1 else []
            return [(queued, ModelFailure(f"the model failed on this request: {reason}")) for queued in blamed]
        return [
            (text.asked, ModelFailure(f"the model failed repeatedly: {reason}")) for text in texts if text.is_restarted
        ]


def _rejection(error: Exception) -> InvalidRequest:
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(f"generation parameters rejected: {library_error_message(error)}")


_INITIAL_ANSWER_TOKENS: Final = 512
_AVERAGE_WEIGHT: Final = 0.05
_MARGIN: Final = 1.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockCapacity:
    """Capacity: blocks of ``block_tokens`` tokens (0 blocks for no limit) and concurrent sequences."""

    blocks: int
    block_tokens: int
    texts: int
    overcommit: float = 1.0
    shares_prompts: bool = True


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """``texts`` sequences with a prompt and up to ``most`` tokens each; ``is_open`` without a user limit."""

    prompt: int
    most: int
    texts: int = 1
    is_open: bool = False


class BlockAdmission(Generic[T]):
    """FIFO admission by reserved KV-cache blocks.

    Without a user limit, an answer reserves a margin over the recent average; the library suspends sequences if needed.
    """

    def __init__(self, room: BlockCapacity, max_queue: int) -> None:
        self._free_prompt_tokens = room
        self._most_waiting = max_queue
        self._queue: deque[tuple[T, BlockDemand]] = deque()
        self._reserved: dict[int, tuple[int, int]] = {}
        self._average_tokens = float(_INITIAL_ANSWER_TOKENS)
        self.blocks = 0
        self.texts = 0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Return whether a request that cannot run at once must be rejected."""
        return len(self._queue) >= self._most_waiting

    def blocks_of(self, need: BlockDemand) -> int:
        """Return the number of blocks to reserve for a request."""
        most = min(need.most, round(self._average_tokens * _MARGIN)) if need.is_open else need.most
        one = self._blocks(need.prompt + most)
        if need.texts == 1 or not self._free_prompt_tokens.shares_prompts:
            return one * need.texts
        return one + (need.texts - 1) * (self._blocks(most) + 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._free_prompt_tokens.block_tokens)

    def fits_now(self, need: BlockDemand) -> bool:
        """Return whether there is room; a lone request always fits."""
        if not self._reserved:
            return True
        if self.texts + need.texts > self._free_prompt_tokens.texts:
            return False
        return not self._free_prompt_tokens.blocks or (
            self.blocks + self.blocks_of(need) <= self._free_prompt_tokens.blocks * self._free_prompt_tokens.overcommit
        )

    def wait(self, item: T, need: BlockDemand) -> None:
        """Append a request to the queue."""
        self._queue.append((item, need))

    def head(self) -> T | None:
        """Return the first queued request, if there is room for it."""
        return self._queue[0][0] if self._queue and self.fits_now(self._queue[0][1]) else None

    def enter(self, number: int) -> T:
        """Remove the first request from the queue and reserve its blocks until :meth:`leave`."""
        item, need = self._queue.popleft()
        blocks = self.blocks_of(need)
        self._reserved[number] = blocks, need.texts
        self.blocks += blocks
        self.texts += need.texts
        return item

    def withdraw(self, item: T) -> bool:
        """Remove a request from the queue; return whether it was there."""
        for place, (each, _) in enumerate(self._queue):
            if each is item:
                del self._queue[place]
                return True
        return False

    def leave(self, number: int, generated: int | None = None) -> None:
        """Release the blocks of a request; ``generated`` is its token count if it ran to its end."""
        blocks, texts = self._reserved.pop(number, (0, 0))
        self.blocks -= blocks
        self.texts -= texts
        if generated is not None:
            self._average_tokens += _AVERAGE_WEIGHT * (generated - self._average_tokens)
