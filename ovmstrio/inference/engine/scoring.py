"""Log-probabilities of the tokens of prompts and texts, with the most likely ones.

The generation library returns only the log-probability of each generated token. A second copy of the model, which is
loaded for the first request, has the logits; it reads one text at a time, between the steps of the batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from ovmstrio.core.errors import ModelFailure
from ovmstrio.inference.engine.pipeline import library_error_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ovmstrio.core.errors import ServerError
    from ovmstrio.inference.engine.batch import QueuedRequest
    from ovmstrio.inference.engine.pipeline import Pipeline, PromptModel

_SCORED_TOKENS: Final = 64  # tokens whose logits are in memory at once


class TokenScore(NamedTuple):
    """Log-probability of a token, None without context, its rank from 1, and the most likely tokens at its place.

    ``rank`` is 0 and ``top`` empty if they are unknown.
    """

    logprob: float | None
    rank: int = 0
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScoreJob:
    """Tokens to score: the prompt of a request, or prompt and text of one of its sequences.

    Attributes:
        top: number of most likely tokens to find at each place.
        index: number of the sequence; None for the prompt.
    """

    queued: QueuedRequest
    tokens: Sequence[int]
    top: int
    index: int | None = None


class TokenScorer:
    """Scores of tokens, for one text of at most ``tokens`` tokens at a time."""

    def __init__(self, pipeline: Pipeline, tokens: int) -> None:
        self._model = pipeline
        self._tokens = tokens
        self._logits: PromptModel | None = None
        self._pipeline: Pipeline | None = None  # with an adapter
        self._waiting: deque[ScoreJob] = deque()
        self._handle: Any = None
        self._scores: list[TokenScore] = []

    @property
    def is_busy(self) -> bool:
        """Return whether :meth:`step` has work."""
        return bool(self._waiting) or (self._pipeline is not None and self._pipeline.is_busy)

    def begin(self, job: ScoreJob) -> None:
        """Queue tokens."""
        self._waiting.append(job)

    def cancel(self, queued: QueuedRequest) -> None:
        """Cancel all jobs of a request."""
        if self._waiting and self._waiting[0].queued is queued:
            self._scores = []
            if self._handle is not None:
                self._handle.cancel()
                self._handle = None
        self._waiting = deque(job for job in self._waiting if job.queued is not queued)

    def step(self) -> list[tuple[ScoreJob, list[TokenScore] | ServerError]]:
        """Process a part of a text; return its job when the text is scored or failed."""
        if not self.is_busy:
            return []
        try:
            if self._logits is None and self._pipeline is None:
                self._logits = self._model.prompt_model()
                if self._logits is None:
                    self._pipeline = self._model.uncached(self._tokens)
            if self._logits is not None:
                is_over = self._step_model(self._logits, self._waiting[0])
            else:
                is_over = self._pipeline is not None and self._step_library(self._pipeline)
        except RuntimeError as error:
            self._pipeline = self._handle = self._logits = None
            self._scores = []
            if not self._waiting:
                return []
            return [(self._waiting.popleft(), ModelFailure(f"the model failed: {library_error_message(error)}"))]
        if not is_over:
            return []
        scores, self._scores = self._scores, []
        return [(self._waiting.popleft(), scores)]

    def _step_model(self, model: PromptModel, job: ScoreJob) -> bool:
        """Score the next tokens; return whether the text is complete."""
        if not self._scores:
            model.begin()
            self._scores = [TokenScore(None)]
        begin = len(self._scores) - 1
        tokens = job.tokens[begin : begin + _SCORED_TOKENS]
        logits = model.logits(tokens)
        targets = job.tokens[begin + 1 : begin + 1 + len(tokens)]
        logits = logits[: len(targets)]
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        values = logits[np.arange(len(targets)), targets]
        ranks = (logits > values[:, None]).sum(1) + 1
        top = _most_likely(logits, job.top)
        likely = np.take_along_axis(logits, top, 1)
        for value, rank, *each in zip(values.tolist(), ranks.tolist(), top.tolist(), likely.tolist(), strict=True):
            self._scores.append(TokenScore(value, rank, list(zip(*each, strict=True))))
        return len(self._scores) == len(job.tokens)

    def _step_library(self, pipeline: Pipeline) -> bool:
        """Process a part of the text with the library; return whether it is complete."""
        if self._handle is None and self._waiting:
            config = pipeline.defaults()
            config.max_new_tokens = 0
            config.echo = True
            config.logprobs = 1
            self._scores = []
            self._handle = pipeline.add(0, list(self._waiting[0].tokens), config)
        pipeline.step()
        if self._handle is None:
            return False
        while self._handle.can_read():
            for output in self._handle.read().values():
                self._scores += map(TokenScore, output.generated_log_probs)
        length = len(self._waiting[0].tokens)
        if len(self._scores) < length:
            if pipeline.is_busy:
                return False
            raise RuntimeError("the prompt was not processed completely")
        self._handle = None
        # The first token has no context; the library's value for it is meaningless.
        self._scores = [TokenScore(None), *self._scores[1:length]]
        return True


def _most_likely(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the largest values of each row, the largest one first; shape [rows, count]."""
    if count <= 1:
        found = logits.argmax(1, keepdims=True)[:, :count]
    else:
        largest = np.argpartition(logits, -count, 1)[:, -count:]
        found = np.take_along_axis(largest, np.take_along_axis(logits, largest, 1).argsort(1)[:, ::-1], 1)
    return cast("npt.NDArray[np.int64]", found)
