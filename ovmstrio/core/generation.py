"""Values of calls that make text, vectors, scores or sound, and the ports of services that take them.

::

    JSON ─> api/openai ─> GenerationRequest ─> data plane ─> TextGenerator.generate ─> Generation ─> Piece ... ─> events
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

from ovmstrio.core.errors import ContextExceeded, InvalidField
from ovmstrio.core.service import Service
from ovmstrio.util.truncation import MAX_TOKENIZED_CHARACTERS, max_characters

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

__all__ = [
    "CallDelta",
    "Conversation",
    "Embedder",
    "Embeddings",
    "Finish",
    "Generation",
    "GenerationLimits",
    "GenerationRequest",
    "GenerativeService",
    "Grammar",
    "GrammarKind",
    "Padding",
    "Piece",
    "Prompt",
    "Reranker",
    "Sampling",
    "StopStrings",
    "Task",
    "TextGenerator",
    "TokenIds",
    "TokenLogprob",
    "TokenRow",
    "Tokenizer",
    "prompt_too_long",
]

# ----------------------------------------------------------------------
# Values of calls that make text, vectors, scores or sound, and the ports of services that take them
# ----------------------------------------------------------------------

TokenIds: TypeAlias = tuple[int, ...]

_TOKEN_CHARACTERS: Final = 6
_MEMBER_CHARACTERS: Final = 100

TokenRow: TypeAlias = "TokenIds | npt.NDArray[np.int64]"
"""Tokens of one text, which may be millions."""


class Task(Enum):
    """What a generative service does; values are those of ``--task``."""

    TEXT_GENERATION = "text_generation"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SPEECH_TO_TEXT = "speech2text"
    TEXT_TO_SPEECH = "text2speech"
    IMAGE_GENERATION = "image_generation"


class Finish(Enum):
    """Why a text ended; values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


# What is asked


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat template makes a prompt of.

    Attributes:
        messages: in OpenAI's form, validated: ``role``, ``content`` as one text (never a list of parts), and what else
            templates know, such as ``tool_calls`` and ``tool_call_id``.
        tools: in OpenAI's form, ``{"type": "function", "function": {...}}`` each.
        tool_choice: ``none``, ``auto``, ``required``, or what is called with ``tool_name``.
        tool_name: the one function that is to be called, where ``tool_choice`` is ``function``.
        template_options: variables of the template, such as ``enable_thinking``.
        calls_once: whether only the first call of an answer is told.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    tool_name: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    calls_once: bool = False


class Padding(Enum):
    """On which side of a text's tokens others are filled in; values are those of ``padding_side``."""

    LEFT = "left"
    RIGHT = "right"


Prompt: TypeAlias = Conversation | str | TokenIds
"""Messages for the template, a text as it is, or the numbers of tokens."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None leaves the choice to the model's ``generation_config.json``, and then to the library.

    ``temperature`` 0 is greedy.  ``best_of`` above 1 is beam search.  ``max_tokens`` None is as many as fit.
    Where tokens are proposed before they are chosen, ``num_assistant_tokens`` are at a time, or those that the proposer
    is surer of than ``assistant_confidence_threshold``; ``max_ngram_size`` tokens are looked for in the prompt.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    best_of: int = 1
    stop_token_ids: TokenIds = ()
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float | None = None
    max_ngram_size: int | None = None


class GrammarKind(Enum):
    """How a form of the text is written down."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a text must have; ``text`` is JSON for schemas and tags."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text, or ``n`` of them, to be made.

    Attributes:
        stop: texts that end it, which are not in it unless ``keeps_stop``.
        logprobs: whether each token comes with the logarithm of its probability.
        echo: whether the prompt comes first, with its log-probabilities if those are asked for.
        parses: whether tool calls and reasoning are taken out of the text, where the model has parsers.
        deadline: on trio's clock; counts from arrival, the queue included.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    n: int = 1
    logprobs: bool = False
    echo: bool = False
    grammar: Grammar | None = None
    skips_special_tokens: bool = True
    parses: bool = True
    deadline: float = math.inf

    @property
    def prompt_characters(self) -> int:
        """The characters of a text, or of the contents and calls of a conversation; 0 for tokens."""
        if not isinstance(self.prompt, Conversation):
            return len(self.prompt) if isinstance(self.prompt, str) else 0
        calls = (call for message in self.prompt.messages for call in message.get("tool_calls") or ())
        arguments = sum(len(call.get("function", {}).get("arguments") or "") for call in calls)
        return arguments + sum(len(message.get("content") or "") for message in self.prompt.messages)

    @property
    def prompt_size(self) -> int:
        """About how many characters the prompt has as JSON."""
        if isinstance(self.prompt, tuple):
            return _TOKEN_CHARACTERS * len(self.prompt)
        members = self.prompt.messages + self.prompt.tools if isinstance(self.prompt, Conversation) else ()
        return self.prompt_characters + _MEMBER_CHARACTERS * len(members)


# What comes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the logarithm of its probability; None for a prompt's first token, which has none."""

    text: str
    logprob: float | None
    id: int = -1


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call of a tool: ``id`` and ``name`` come with the first part, ``arguments`` grow."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has come of text ``index`` since the last piece; the last has a ``finish``.

    ``tokens`` were generated, ``reasoning_tokens`` of them for reasoning, its marks included.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    reasoning_tokens: int = 0


class Generation(Protocol):
    """A request that is being answered."""

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        ...

    @property
    def cached_tokens(self) -> int:
        """How many of them were found in the prefix cache, as far as that is known."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Give pieces until each text has had its last one.

        Pieces that nobody takes are joined, so that a slow reader holds no more than its own answer.

        Raises:
            ServerError: the request failed midway.

        Cancellation: while there is none; leaving the block that opened it ends the request.
        """
        ...


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What a model can take: tokens of prompt and answer together; of the answer; beams; all None where unlimited.

    ``longest_token`` is the number of characters of the longest token, 0 if unknown.
    """

    context_length: int | None = None
    max_tokens_limit: int | None = None
    best_of_limit: int = 20
    vocabulary_size: int | None = None
    longest_token: int = 0

    @property
    def max_characters(self) -> int:
        """Characters of a prompt; a longer one cannot fit the context."""
        if self.context_length is None:
            return MAX_TOKENIZED_CHARACTERS
        return max_characters(self.context_length, self.longest_token)


def prompt_too_long(limits: GenerationLimits, field: str, characters: int) -> InvalidField:
    """Return the error for a prompt with more characters than fit the context of a model."""
    if limits.context_length is None:
        message = f"{field}: expected at most {limits.max_characters} characters"
        return InvalidField(message, field=field, got=str(characters))
    most = f"This model's maximum context length is {limits.context_length} tokens"
    tokens = characters * limits.context_length // limits.max_characters
    return ContextExceeded(
        f"{most}, and {field} has at least {characters} characters, which are at least {tokens} tokens", field=field
    )


# Ports


class GenerativeService(Service, Protocol):
    """A service that does something of this module."""

    @property
    def tasks(self) -> frozenset[Task]:
        """What it does; constant for its life."""
        ...


class TextGenerator(GenerativeService, Protocol):
    """Makes text; has ``Task.TEXT_GENERATION``."""

    @property
    def limits(self) -> GenerationLimits:
        """What it can take; constant for its life."""
        ...

    def generate(self, asked: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Begin to answer, once there is room; entering returns when the prompt has been accepted.

        Leaving before the end cancels the request, within one step of the engine, without waiting for that step.

        Raises:
            InvalidRequest: on entering: the prompt does not fit the context, the template or the grammar fails.
            Overloaded: on entering: the queue is full.
            DeadlineExceeded: the deadline has passed, waiting or generating.
            ServerError: on entering, or from the iteration, such as an engine that ended.

        Cancellation: anywhere; the request leaves the queue or the batch.
        """
        ...


@runtime_checkable
class Tokenizer(GenerativeService, Protocol):
    """Knows the tokens of its model."""

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Give the tokens of each text; never on the event loop.

        Args:
            texts: what is to be cut into tokens, each by itself.
            add_special_tokens: whether the marks that the model wants around a text are among them.
            max_length: how many a text may have, those marks included; what is more is cut off its end.
            padding: where texts that have fewer than ``max_length`` are filled up with the token for that; None for
                nowhere.

        Raises:
            InvalidRequest: a text cannot be tokenized, or the tokenizer has no such option.
            ServerError: the engine has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of shape [inputs, dimension], f32, and how many tokens the inputs had."""

    vectors: npt.NDArray[np.float32]
    tokens: int


class Embedder(GenerativeService, Protocol):
    """Makes vectors of texts; has ``Task.EMBEDDINGS``."""

    async def embed(self, inputs: Sequence[str | TokenIds]) -> Embeddings:
        """Give a vector for each input, in their order.

        Raises:
            InvalidRequest: an input is longer than the model takes, or there are too many.
            ServerError: as inference.

        Cancellation: at any checkpoint.
        """
        ...


class Reranker(GenerativeService, Protocol):
    """Says how well documents answer a query; has ``Task.RERANK``."""

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Give a score from 0 to 1 for each document, in their order, and how many tokens were read.

        Raises:
            InvalidRequest: as for :class:`Embedder`.
            ServerError: as inference.

        Cancellation: at any checkpoint.
        """
        ...


# ----------------------------------------------------------------------
# Where a text ends that comes in pieces and is to end at one of several strings
# ----------------------------------------------------------------------


class StopStrings:
    """Watches one text.  What may be the beginning of a stop string is held back until that is known.

    Args:
        strings: at which the text ends; empty ones are passed over.
        keeps: whether the text ends behind the string, which is left out otherwise.

    Attributes:
        has_stopped: whether a string has come; nothing is given from then on.
    """

    __slots__ = ("_held", "_keeps", "_matchers", "has_stopped")

    def __init__(self, strings: Iterable[str], *, keeps: bool = False) -> None:
        self.has_stopped = False
        self._matchers = [_Matcher(string) for string in strings if string]
        self._keeps = keeps
        self._held = ""

    def feed(self, text: str) -> str:
        """Take what has come; give what is certain to be part of the text."""
        if self.has_stopped:
            return ""
        if not self._matchers:
            return text
        held = self._held + text
        for position, letter in enumerate(text, len(held) - len(text) + 1):
            found = max([matcher.length for matcher in self._matchers if matcher.step(letter)], default=0)
            if found:
                self.has_stopped = True
                self._held = ""
                return held[: position if self._keeps else position - found]
        certain = len(held) - max(matcher.matched for matcher in self._matchers)
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """Give what was held back, for no more comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Follows a text letter by letter, after Knuth, Morris and Pratt: ``matched`` letters of a string end it so far."""

    __slots__ = ("_shorter", "_string", "length", "matched")

    def __init__(self, string: str) -> None:
        self.length = len(string)
        self.matched = 0
        self._string = string
        # By how many letters have matched, how many of the string's beginning end these as well.
        self._shorter = [0, 0]
        border = 0
        for letter in string[1:]:
            border = self._longer(border, letter)
            self._shorter.append(border)

    def step(self, letter: str) -> bool:
        """Take a letter; tell whether the string ends with it."""
        self.matched = self._longer(self.matched, letter)
        return self.matched == self.length

    def _longer(self, matched: int, letter: str) -> int:
        """Give how many letters match behind one more."""
        while matched and self._string[matched] != letter:
            matched = self._shorter[matched]
        return matched + (self._string[matched] == letter)
