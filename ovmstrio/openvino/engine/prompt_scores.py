"""How likely prompts are, token by token: a batch of its own, because a prefix that is cached has no probabilities.

The library leaves them out for what it does not compute, without a word.  The batch is made when it is first needed,
and reads one prompt after the other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.openvino.engine.library_errors import reason_of

if TYPE_CHECKING:
    from ovmstrio.openvino.engine.pipeline import Pipeline
    from ovmstrio.openvino.engine.texts import AskedTexts

__all__ = ["PromptScores"]


class PromptScores:
    """Reads prompts.

    Args:
        pipeline: of the same model.
        tokens: how many a prompt has at most.
    """

    def __init__(self, pipeline: Pipeline, tokens: int) -> None:
        self._model = pipeline
        self._tokens = tokens
        self._pipeline: Pipeline | None = None
        self._waiting: deque[AskedTexts] = deque()
        self._handle: Any = None
        self._scores: list[float | None] = []

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is to be read, or to be forgotten."""
        return bool(self._waiting) or (self._pipeline is not None and self._pipeline.is_busy)

    def begin(self, asked: AskedTexts) -> None:
        """Have the prompt of a request read."""
        self._waiting.append(asked)

    def cancel(self, asked: AskedTexts) -> None:
        """Leave it."""
        if asked in self._waiting:
            if asked is self._waiting[0] and self._handle is not None:
                self._handle.cancel()
                self._handle = None
            self._waiting.remove(asked)

    def step(self) -> list[tuple[AskedTexts, ServerError | None]]:
        """Read a part of a prompt; give the request whose prompt has been read, or could not be."""
        if not self.is_busy:
            return []
        try:
            return self._step()
        except RuntimeError as error:
            self._pipeline = self._handle = None
            if not self._waiting:
                return []
            failure = ModelFailure(f"the model failed on this prompt: {reason_of(error)}")
            return [(self._waiting.popleft(), failure)]

    def _step(self) -> list[tuple[AskedTexts, ServerError | None]]:
        if self._pipeline is None:
            self._pipeline = self._model.uncached(self._tokens)
        if self._handle is None and self._waiting:
            config = self._pipeline.defaults()
            config.max_new_tokens = 0
            config.echo = True
            config.logprobs = 1
            self._scores = []
            self._handle = self._pipeline.add(0, self._waiting[0].prompt, config)
        self._pipeline.step()
        if self._handle is None:
            return []
        while self._handle.can_read():
            for output in self._handle.read().values():
                self._scores += output.generated_log_probs
        asked = self._waiting[0]
        if len(self._scores) < len(asked.prompt):
            if self._pipeline.is_busy:
                return []
            raise RuntimeError("it was not read to its end")
        # What the library gives for the first token, which nothing comes before, means nothing.
        asked.prompt_logprobs = [None, *self._scores[1 : len(asked.prompt)]]
        self._handle = None
        return [(self._waiting.popleft(), None)]
