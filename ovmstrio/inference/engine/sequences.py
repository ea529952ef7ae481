"""Running sequences of the batch: sampling configuration, state, output, and restart after a batch rebuild."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from openvino_genai.py_openvino_genai import GenerationFinishReason, GenerationStatus

from ovmstrio.core.generation import Finish
from ovmstrio.inference.engine.sampling import configure_generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.inference.engine.pipeline import Pipeline

_FINISH_REASONS: Final = {
    GenerationFinishReason.STOP: Finish.STOP,
    GenerationFinishReason.TOOL_CALL: Finish.STOP,
    GenerationFinishReason.LENGTH: Finish.LENGTH,
}
_SEEDS: Final = 2**32


class SequenceDivergedError(Exception):
    """A restarted sequence produced different tokens."""

    def __init__(self) -> None:
        super().__init__("the model failed and could not continue the same text")


class CacheFullError(Exception):
    """The KV cache has no room for a sequence, even alone."""

    def __init__(self) -> None:
        super().__init__("the KV cache has no room for this text")


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request ready to run.

    Attributes:
        prompt_logprobs: log-probabilities of the prompt, the first one None; empty unless echoed.
    """

    id: int  # the server's request number
    message_number: int  # number of the message to answer when the request runs; 0 once answered
    request: GenerationRequest
    prompt: list[int]
    most: int  # maximum tokens per sequence
    seed: int
    is_open: bool = False  # whether the user set no limit of tokens
    is_grammar_proven: bool = True  # whether its grammar, if any, is known to work
    prompt_logprobs: list[float | None] = field(default_factory=list)
    left: int = 0  # number of sequences that have not ended
    generated: int = 0  # number of generated tokens
    cached: int = 0  # number of prompt tokens found in the prefix cache, as far as known


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
    """

    def __init__(self, queued: QueuedRequest, index: int = 0) -> None:
        self.asked = queued
        self.index = index
        self.handle: Any = None  # the library's handle, None before the start; dropping it ends the sequence
        self.is_new = False  # started, no step since
        self.is_reading = False  # in prefill
        self.is_settled = False
        self.is_leaving = False  # cancelled, but finishing its prefill
        self.is_suspect = False  # was new, with others, in a step that failed, and has not run since
        self.is_restarted = False  # restarted after a failed step
        self.is_first = False  # received its first token in the last step
        self.is_newly_suspended = False  # left out of the last step, but not of the one before
        self._is_suspended = False
        self._prompt_tokens_left = 0
        self._tokens: list[int] = []
        self._sent_tokens: list[int] = []

    @property
    def has_beams(self) -> bool:
        """Return whether this is a beam search, whose tokens come at its end."""
        return self.asked.request.sampling.best_of > 1

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
        if self._must_repeat():
            # A previous restart may not have reached all tokens already sent; keep the rest for comparison.
            self._sent_tokens, self._tokens = self._tokens + self._sent_tokens, []
        made = len(self._tokens)
        sampling = request.sampling
        seed = (queued.seed + self.index + made) % _SEEDS
        config = configure_generation(
            pipeline.defaults(), sampling, texts=request.n, seed=seed, grammar=request.grammar
        )
        config.max_new_tokens = queued.most - made
        config.min_new_tokens = min(max((sampling.min_tokens or 0) - made, 0), queued.most - made)
        config.logprobs = int(request.logprobs)
        self.is_new = self.is_reading = True
        self.is_settled = False
        self._prompt_tokens_left = len(self.pending_tokens)
        self.handle = pipeline.add(number, self.pending_tokens, config)

    def _must_repeat(self) -> bool:
        """Return whether earlier tokens affect the next one in ways that a prompt cannot carry."""
        sampling = self.asked.request.sampling
        penalties = sampling.frequency_penalty, sampling.presence_penalty
        return self.asked.request.grammar is not None or any(penalties)

    def read(self) -> list[SequenceOutput]:
        """Return the output of the last step.

        Raises:
            DifferentTextError: a restarted sequence differs from the tokens already sent.
            NoRoomError: the KV cache has no room for it.
        """
        # Reading without data would block forever.
        has_come = self.handle.can_read()
        self._record_step(has_come=has_come)
        if not has_come:
            if self.handle.get_status() == GenerationStatus.IGNORED:
                raise CacheFullError
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
        has_begun = bool(self._tokens) and not self.is_new
        self.is_first = has_come and not self._tokens
        self.is_settled = self.is_settled or (has_come and not self.is_reading)
        self.is_reading = self.is_reading and not has_come
        self.is_newly_suspended = has_begun and not has_come and not self._is_suspended
        self._is_suspended = has_begun and not has_come

    def record_prefill(self, most: int) -> int:
        """Record at least how many prompt tokens of a beam search a step has processed, at most ``most``."""
        taken = min(most, self._prompt_tokens_left)
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
