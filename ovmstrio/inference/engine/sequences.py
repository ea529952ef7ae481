"""Texts that the batch makes, from their prompts to their ends, and how they go on after the batch was made again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import openvino_genai as genai
from openvino_genai.py_openvino_genai import GenerationFinishReason, GenerationStatus

from ovmstrio.core.generation import Finish, Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.generation import GenerationRequest, Sampling
    from ovmstrio.inference.engine.pipeline import Pipeline

__all__ = ["NO_TOP_K", "AskedTexts", "DifferentTextError", "NewTokens", "NoRoomError", "RunningText", "configure"]

# ----------------------------------------------------------------------
# How the library is told to choose tokens: as a request wishes, then the model's own settings, then what is usual
# ----------------------------------------------------------------------

USUAL_TOP_K: Final = 40
NO_TOP_K: Final = 2**64 - 1
"""What the library takes for all tokens."""

_SAME_NAMES: Final = (
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "length_penalty",
    "ignore_eos",
    "max_ngram_size",
)
_GRAMMARS: Final = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.JSON_OBJECT: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tags_config",
}
_ANY_OBJECT: Final = '{"type": "object"}'


def configure(config: Any, sampling: Sampling, *, texts: int = 1, seed: int = 0, grammar: Grammar | None = None) -> Any:
    """Give a configuration of the library's for one request, but for its length.

    Args:
        config: the defaults of the model, which are changed.
        sampling: what is wished.
        texts: how many texts are made of beams.
        seed: where the dice of this request begin.
        grammar: the form that the text must have.

    Raises:
        RuntimeError: the library does not take the values; the message says why.
    """
    for name in _SAME_NAMES:
        value = getattr(sampling, name)
        if value is not None:
            setattr(config, name, value)
    _propose(config, sampling)
    if sampling.stop_token_ids:
        config.stop_token_ids = {*config.stop_token_ids, *sampling.stop_token_ids}
    if sampling.best_of > 1:
        config.num_beams = sampling.best_of
        config.num_return_sequences = texts
        config.do_sample = False
    else:
        _choose(config, sampling, seed)
    if grammar is not None:
        text = _ANY_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
        form = genai.StructuredOutputConfig()
        setattr(form, _GRAMMARS[grammar.kind], text)
        config.structured_output_config = form
    return config


def _choose(config: Any, sampling: Sampling, seed: int) -> None:
    temperature = config.temperature if sampling.temperature is None else sampling.temperature
    config.do_sample = temperature > 0
    if not config.do_sample:
        return
    config.temperature = temperature
    config.rng_seed = seed
    if sampling.top_k is not None:
        config.top_k = sampling.top_k if sampling.top_k > 0 else NO_TOP_K
    elif config.top_k == NO_TOP_K:
        config.top_k = USUAL_TOP_K


def _propose(config: Any, sampling: Sampling) -> None:
    """Say how many tokens are proposed: so many, or for as long as the proposer is sure of them."""
    if sampling.num_assistant_tokens is not None:
        config.num_assistant_tokens, config.assistant_confidence_threshold = sampling.num_assistant_tokens, 0.0
    elif sampling.assistant_confidence_threshold is not None:
        config.num_assistant_tokens = 0
        config.assistant_confidence_threshold = sampling.assistant_confidence_threshold


# ----------------------------------------------------------------------
# Texts that the batch makes, from their prompts to their ends, and how they go on after the batch was made again
# ----------------------------------------------------------------------

_ENDS: Final = {
    GenerationFinishReason.STOP: Finish.STOP,
    GenerationFinishReason.TOOL_CALL: Finish.STOP,
    GenerationFinishReason.LENGTH: Finish.LENGTH,
}
_SEEDS: Final = 2**32


class DifferentTextError(Exception):
    """A text that was begun again came out differently."""

    def __init__(self) -> None:
        super().__init__("the model failed, and could not go on with the same text")


class NoRoomError(Exception):
    """The cache of keys and values had no room for a text, even alone."""

    def __init__(self) -> None:
        super().__init__("the cache of keys and values has no room for this text")


@dataclass(slots=True, eq=False)
class AskedTexts:
    """A request, ready to be run.

    Attributes:
        id: the server's number for it.
        answer_to: the number of the message that waits to be told that it runs; 0 once it was told.
        request: what is asked.
        prompt: its tokens.
        most: how many tokens each text has at most.
        seed: where the dice begin.
        is_open: whether nobody has said how long the texts may get.
        is_proven: whether the library is known to take the form that they must have, if there is one.
        prompt_logprobs: of the prompt's tokens, the first one None; empty unless they are echoed.
        left: how many texts have not ended.
        generated: how many tokens have been made.
        cached: how many of the prompt's tokens were found in the cache of prefixes, as far as that is known.
    """

    id: int
    answer_to: int
    request: GenerationRequest
    prompt: list[int]
    most: int
    seed: int
    is_open: bool = False
    is_proven: bool = True
    prompt_logprobs: list[float | None] = field(default_factory=list)
    left: int = 0
    generated: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What has come of one of a request's texts, and why that ended, if it has."""

    asked: AskedTexts
    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None


class RunningText:
    """One text of a request, or all of them where they are made of beams.

    Args:
        asked: the request.
        index: which of its texts.

    Attributes:
        handle: the library's, None before it is started; whoever drops it ends the text.
        is_new: whether it was started, and no step has been made since.
        is_reading: whether it was started, and has had no token since, or as beams may not have read its prompt.
        is_settled: whether it has had two since, so that the library knows its last block by all that is in it.
        is_leaving: whether nobody wants it any more, and it only reads its prompt to the end.
        is_suspect: whether a step has failed in which it and others were new, and it has been in none since.
        was_restarted: whether it has been begun again, after a step that failed.
        is_first: whether the last step has brought its first token.
        was_suspended: whether the last step has left it out, and the one before it had not.
    """

    def __init__(self, asked: AskedTexts, index: int = 0) -> None:
        self.asked = asked
        self.index = index
        self.handle: Any = None
        self.is_new = False
        self.is_reading = False
        self.is_settled = False
        self.is_leaving = False
        self.is_suspect = False
        self.was_restarted = False
        self.is_first = False
        self.was_suspended = False
        self._is_suspended = False
        self._unread = 0
        self._tokens: list[int] = []
        self._told: list[int] = []

    @property
    def has_beams(self) -> bool:
        """Whether it is all texts of a request, whose tokens come at their end."""
        return self.asked.request.sampling.best_of > 1

    @property
    def length(self) -> int:
        """How many tokens it has, those of its prompt included."""
        return len(self.asked.prompt) + len(self._tokens)

    @property
    def read_first(self) -> list[int]:
        """What is read before its next token is made."""
        return self.asked.prompt + self._tokens

    @property
    def computed(self) -> list[int]:
        """The tokens whose keys and values have been computed for sure: all but the last one, once there is any."""
        return self.asked.prompt + self._tokens[:-1] if self._tokens else []

    def ends_within(self, tokens: Sequence[int], block_tokens: int) -> bool:
        """Tell whether tokens begin with all that the library has of it, the last block of which is not full."""
        if self.handle is None:
            return False
        prompt = self.asked.prompt
        length = max(len(prompt), self.length - 1)
        if not length % block_tokens or length > len(tokens) or prompt != tokens[: len(prompt)]:
            return False
        return self._tokens[: length - len(prompt)] == tokens[len(prompt) : length]

    def start(self, pipeline: Pipeline, number: int) -> None:
        """Have it made, from where it is.

        Raises:
            RuntimeError: the library does not take what is asked.
        """
        asked, request = self.asked, self.asked.request
        if self._must_repeat():
            # What is left was told before it was begun again the last time, if that has not come so far.
            self._told, self._tokens = self._tokens + self._told, []
        made = len(self._tokens)
        sampling = request.sampling
        seed = (asked.seed + self.index + made) % _SEEDS
        config = configure(pipeline.defaults(), sampling, texts=request.n, seed=seed, grammar=request.grammar)
        config.max_new_tokens = asked.most - made
        config.min_new_tokens = min(max((sampling.min_tokens or 0) - made, 0), asked.most - made)
        config.logprobs = int(request.logprobs)
        self.is_new = self.is_reading = True
        self.is_settled = False
        self._unread = len(self.read_first)
        self.handle = pipeline.add(number, self.read_first, config)

    def _must_repeat(self) -> bool:
        """Tell whether the tokens so far have more to say about the next one than those of a prompt."""
        sampling = self.asked.request.sampling
        penalties = sampling.frequency_penalty, sampling.presence_penalty
        return self.asked.request.grammar is not None or any(penalties)

    def read(self) -> list[NewTokens]:
        """Give what the last step has made of it.

        Raises:
            DifferentTextError: as said there.
            NoRoomError: as said there.
        """
        # To read where there is nothing would wait for ever.
        has_come = self.handle.can_read()
        self._note(has_come=has_come)
        if not has_come:
            if self.handle.get_status() == GenerationStatus.IGNORED:
                raise NoRoomError
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
                finish = _ENDS.get(output.finish_reason, finish)
        self._tokens += tokens
        told = min(len(self._told), len(tokens))
        if self._told[:told] != tokens[:told]:
            raise DifferentTextError
        del self._told[:told]
        if told == len(tokens) and finish is None:
            return []
        return [NewTokens(self.asked, self.index, tokens[told:], logprobs[told:], finish)]

    def _note(self, *, has_come: bool) -> None:
        """Note whether the step has made a token; texts that go on get one each, unless there is no room for it."""
        has_begun = bool(self._tokens) and not self.is_new
        self.is_first = has_come and not self._tokens
        self.is_settled = self.is_settled or (has_come and not self.is_reading)
        self.is_reading = self.is_reading and not has_come
        self.was_suspended = has_begun and not has_come and not self._is_suspended
        self._is_suspended = has_begun and not has_come

    def read_on(self, most: int) -> int:
        """Note how many tokens of their prompt a step has read for beams at least, ``most`` if there are so many."""
        taken = min(most, self._unread)
        self._unread -= taken
        self.is_reading = self._unread > 0
        return taken

    def _read_beams(self) -> list[NewTokens]:
        best = sorted(self.handle.read().values(), key=lambda output: output.score, reverse=True)
        return [
            NewTokens(
                self.asked,
                index,
                list(output.generated_ids),
                list(output.generated_log_probs),
                _ENDS.get(output.finish_reason, Finish.STOP),
            )
            for index, output in enumerate(best[: self.asked.request.n])
        ]

    def cancel(self) -> None:
        """Have it leave the batch at the next step."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None
        self.is_new = self.is_reading = False
