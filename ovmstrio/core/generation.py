"""Requests, results and service protocols of text, embedding and rerank models.

::

    JSON ─> protocols/openai ─> GenerationRequest ─> data plane ─> TextGenerator.generate ─> Generation ─> Piece
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ovmstrio.core.errors import ContextExceeded, InvalidField
from ovmstrio.core.service import Service
from ovmstrio.util.truncation import MAX_TOKENIZED_CHARACTERS, max_characters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = tuple[int, ...]

_TOKEN_CHARACTERS: Final = 6
_MEMBER_CHARACTERS: Final = 100

TokenRow: TypeAlias = "TokenIds | npt.NDArray[np.int64]"
"""Token ids of one text, possibly millions."""


class Task(Enum):
    """Tasks of generative services; values are those of ``--task``."""

    TEXT_GENERATION = "text_generation"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SPEECH_TO_TEXT = "speech2text"
    TEXT_TO_SPEECH = "text2speech"
    IMAGE_GENERATION = "image_generation"


class Finish(Enum):
    """Finish reasons; values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


IMAGE_MARK: Final = "<ov_genai_image_"
"""Beginning of a mark of an image; reserved by OpenVINO GenAI, so that texts of clients must not have it."""


def image_mark(index: int) -> str:
    """Return the mark of an image's place in the content of a message."""
    return f"{IMAGE_MARK}{index}>"


class Image(NamedTuple):
    """Image of a conversation: its URL, or its encoded file once loaded; ``field`` is its path in the request."""

    source: str | bytes
    field: str


ALL_DOMAINS: Final = "all"
"""Allowed domain of all hosts with public addresses."""


class MediaPolicy(NamedTuple):
    """Sources of images apart from data URLs: hosts of URLs, and a folder of local files; none by default."""

    domains: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages for the chat template.

    Attributes:
        messages: validated OpenAI messages; ``content`` is one string, never a list of parts.
        images: in the order of their indices; the contents of messages have their marks.
        tools: OpenAI tools, each ``{"type": "function", "function": {...}}``.
        tool_choice: ``none``, ``auto``, ``required`` or ``function``.
        tool_name: the function to call if ``tool_choice`` is ``function``.
        template_options: template variables, such as ``enable_thinking``.
        returns_first_call_only: whether only the first tool call is returned.
        continues_final_message: whether the prompt ends with the content of the last message, which the answer
            continues.
        parameters_fields: field of the request that has the parameters of each tool; empty for those of chats.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    tool_name: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    returns_first_call_only: bool = False
    continues_final_message: bool = False
    parameters_fields: tuple[str, ...] = field(default=(), compare=False)
    images: tuple[Image, ...] = ()

    @property
    def has_loaded_images(self) -> bool:
        """True if all images, if any, are loaded."""
        return all(isinstance(image.source, bytes) for image in self.images)


class Padding(Enum):
    """Side of the padding tokens; values are those of ``padding_side``."""

    LEFT = "left"
    RIGHT = "right"


Prompt: TypeAlias = Conversation | str | TokenIds
"""Chat messages, a raw prompt or token ids."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None means the value of ``generation_config.json``, then the library's default.

    ``temperature`` 0 is greedy, ``best_of`` above 1 is beam search, ``max_tokens`` None means as many as fit the
    context.
    The last three apply to speculative decoding and prompt lookup.
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
    """Grammar formats."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Structured-output grammar; ``text`` is JSON for schemas and structural tags.

    ``is_strict`` refuses a schema that the engine cannot impose completely; ``field`` is the field of the request.
    """

    kind: GrammarKind
    text: str
    is_strict: bool = False
    field: str = dataclasses.field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text-generation request with ``n`` completions.

    Attributes:
        stop: stop strings, excluded from the text unless ``includes_stop``.
        logprobs: whether each token has a log-probability.
        top_logprobs: number of most likely tokens at each place of the text, which come after its end; with
            ``logprobs``.
        prompt_logprobs: number of most likely tokens at each place of the prompt; None for no log-probabilities.
        echo: whether the completion starts with the prompt, with log-probabilities if requested.
        parses_output: whether the output parsers of the model extract tool calls and reasoning.
        prompt_field: field of the request that errors of the prompt name.
        adds_special_tokens: whether the tokenizer adds its special tokens; None for texts, but not for conversations.
        prompt_limit: tokens to which a longer prompt is truncated, -1 for as many as leave room for the answer.
        truncates_end: whether a truncated prompt keeps its first tokens, not its last ones.
        bad_words: texts that the answer must not have.
        deadline: on trio's clock, queueing included.
        cache_salt: cached tokens are reported only of prompts with the same salt.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    echo: bool = False
    grammar: Grammar | None = None
    skips_special_tokens: bool = True
    parses_output: bool = True
    deadline: float = math.inf
    prompt_field: str = field(default="prompt", compare=False)
    adds_special_tokens: bool | None = None
    prompt_limit: int | None = None
    truncates_end: bool = False
    bad_words: tuple[str, ...] = ()
    cache_salt: str = ""

    @property
    def prompt_characters(self) -> int:
        """Characters of the prompt text or of the conversation's contents and tool arguments; 0 for token ids."""
        if not isinstance(self.prompt, Conversation):
            return len(self.prompt) if isinstance(self.prompt, str) else 0
        calls = (call for message in self.prompt.messages for call in message.get("tool_calls") or ())
        arguments = sum(len(call.get("function", {}).get("arguments") or "") for call in calls)
        return arguments + sum(len(message.get("content") or "") for message in self.prompt.messages)

    @property
    def prompt_size(self) -> int:
        """Estimated characters of the prompt as JSON."""
        if isinstance(self.prompt, tuple):
            return _TOKEN_CHARACTERS * len(self.prompt)
        members = self.prompt.messages + self.prompt.tools if isinstance(self.prompt, Conversation) else ()
        return self.prompt_characters + _MEMBER_CHARACTERS * len(members)


class LikelyToken(NamedTuple):
    """One of the most likely tokens at a place, with its log-probability; ``data`` is as of :class:`TokenLogprob`."""

    data: bytes
    logprob: float
    id: int = -1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability; None for the first token of a prompt.

    ``data`` is UTF-8, possibly a part of a character; ``offset`` the index in the text of the character that begins
    with the token or has it. ``top`` has the most likely tokens, if known, the most likely one first; ``rank`` is the
    place of the token among all, from 1, or 0 if unknown.
    """

    data: bytes
    logprob: float | None
    id: int = -1
    offset: int = 0
    top: tuple[LikelyToken, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One part of a tool call: the first part has ``id`` and ``name``, ``arguments`` are appended."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Output of completion ``index`` since the previous piece; the last piece has a ``finish``.

    ``tokens`` is the number of generated tokens, ``reasoning_tokens`` the part of them within reasoning markers
    (inclusive), ``stop`` the stop string that ended the text, if one did. ``prompt_logprobs`` has the tokens of the
    prompt, if requested, in one piece of the first completion.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    reasoning_tokens: int = 0
    stop: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Generation(Protocol):
    """A running generation request."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that requests of the same caller and salt have left in the prefix cache."""

    def listen(self, take: Callable[[Iterable[GenerationChunk]], bool]) -> None:
        """Pass pieces that arrive while a task waits for the next one to ``take``, without a switch to that task.

        ``take`` returns False, having read no piece, to leave them to the iteration, which has all other pieces. It
        must not block; the iteration raises its errors. A generation may ignore it.
        """

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        """Iterate over pieces until each completion has finished.

        Pending pieces are joined, so that a slow reader buffers no more than its own response.

        Raises:
            ServerError: the request failed midway.

        Cancellation: leaving the block that opened the generation cancels the request.
        """


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Limits of a text model; None means unlimited.

    ``context_length`` is prompt plus completion tokens, ``max_tokens_limit`` completion tokens, ``best_of_limit``
    beams,
    ``longest_token`` the characters of the longest token (0 if unknown), ``takes_images`` whether messages may have
    images.
    """

    context_length: int | None = None
    max_tokens_limit: int | None = None
    best_of_limit: int = 20
    vocabulary_size: int | None = None
    longest_token: int = 0
    takes_images: bool = False

    @property
    def max_characters(self) -> int:
        """Maximum characters of a prompt that can fit the context."""
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


class GenerativeService(Service, Protocol):
    """A service that runs generative tasks."""

    @property
    def tasks(self) -> frozenset[Task]:
        """Supported tasks; constant for the life of the service."""


class TextGenerator(GenerativeService, Protocol):
    """A service with ``Task.TEXT_GENERATION``."""

    @property
    def limits(self) -> GenerationLimits:
        """Limits of the model; constant for the life of the service."""

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """Start a request; entering returns when the engine has accepted the prompt.

        Leaving early cancels the request within one engine step, without waiting for that step.

        Raises:
            InvalidRequest: on entering: the prompt does not fit the context, the template or the grammar fails.
            Overloaded: on entering: the queue is full.
            DeadlineExceeded: the deadline passed while queueing or generating.
            ServerError: on entering or from the iteration, such as an engine exit.
        """


@runtime_checkable
class Tokenizer(GenerativeService, Protocol):
    """A service that can tokenize."""

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Tokenize texts off the event loop.

        Args:
            texts: are tokenized separately.
            add_special_tokens: whether the model's special tokens are added.
            max_length: tokens to which each text is truncated, special tokens included.
            padding: side on which texts are padded to ``max_length``; None for no padding.

        Raises:
            InvalidRequest: a text cannot be tokenized, or the tokenizer lacks an option.
            ServerError: the engine has exited.
        """


@runtime_checkable
class Detokenizer(GenerativeService, Protocol):
    """A service that can convert tokens to text."""

    async def detokenize(self, tokens: TokenIds) -> str:
        """Return the text of tokens, special tokens included.

        Raises:
            InvalidRequest: a token is unknown.
            ServerError: the engine has exited.
        """


@runtime_checkable
class PromptTokenizer(Tokenizer, Detokenizer, Protocol):
    """A tokenizer that knows a chat template, and the texts of tokens."""

    @property
    def limits(self) -> GenerationLimits:
        """Limits of the model."""

    async def tokenize_conversation(self, conversation: Conversation) -> TokenRow:
        """Return the tokens of the prompt of a conversation.

        Raises:
            InvalidRequest: the chat template rejects the conversation.
            ServerError: the engine has exited.
        """

    async def token_texts(self, tokens: TokenRow) -> list[str]:
        """Return the text of each token; bytes that are no text are replaced; raises as :meth:`detokenize`."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Float32 vectors of shape [inputs, dimension], and the number of input tokens."""

    vectors: npt.NDArray[np.float32]
    tokens: int


class Embedder(GenerativeService, Protocol):
    """A service with ``Task.EMBEDDINGS``."""

    async def embed(
        self, inputs: Sequence[str | TokenIds], *, prompt_name: str | None = None, max_tokens: int | None = None
    ) -> Embeddings:
        """Return one vector per input, in order.

        Args:
            inputs: texts or tokens.
            prompt_name: prompt of the model that precedes texts; empty for none, None for the default one.
            max_tokens: truncates inputs, -1 to what the model takes.

        Raises:
            InvalidRequest: an input is too long, there are too many, or the prompt is unknown.
            ServerError: inference failed.
        """


class Reranker(GenerativeService, Protocol):
    """A service with ``Task.RERANK``."""

    async def rerank(
        self, query: str, documents: Sequence[str], *, max_tokens: int | None = None
    ) -> tuple[list[float], int]:
        """Return a score from 0 to 1 per document, in order, and the number of input tokens.

        ``max_tokens`` truncates documents so that query and document have that many tokens, -1 for as many as the model
        takes.

        Raises:
            InvalidRequest: as for :class:`Embedder`.
            ServerError: inference failed.
        """


# Stop strings


class StopStrings:
    """Detector of stop strings in streamed text; a possible beginning of a stop string is held back.

    Args:
        strings: stop strings; empty ones are ignored.
        keeps: whether the output includes the stop string.

    Attributes:
        found: the stop string that was found, or an empty text; later input is dropped.
    """

    __slots__ = ("_held", "_keeps", "_matchers", "found")

    def __init__(self, strings: Iterable[str], *, keeps: bool = False) -> None:
        self.found = ""
        self._matchers = [_Matcher(string) for string in strings if string]
        self._keeps = keeps
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text and return the output that is certain."""
        if self.found:
            return ""
        if not self._matchers:
            return text
        held = self._held + text
        for position, letter in enumerate(text, len(held) - len(text) + 1):
            found = max([matcher.length for matcher in self._matchers if matcher.step(letter)], default=0)
            if found:
                self.found = held[position - found : position]
                self._held = ""
                return held[: position if self._keeps else position - found]
        certain = len(held) - max(matcher.matched for matcher in self._matchers)
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """Return the text held back at the end of the input."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt matcher; ``matched`` is the length of the string's prefix at the end of the text."""

    __slots__ = ("_shorter", "_string", "length", "matched")

    def __init__(self, string: str) -> None:
        self.length = len(string)
        self.matched = 0
        self._string = string
        # Failure function: by matched length, the length of the longest border.
        self._shorter = [0, 0]
        border = 0
        for letter in string[1:]:
            border = self._longer(border, letter)
            self._shorter.append(border)

    def step(self, letter: str) -> bool:
        self.matched = self._longer(self.matched, letter)
        return self.matched == self.length

    def _longer(self, matched: int, letter: str) -> int:
        while matched and self._string[matched] != letter:
            matched = self._shorter[matched]
        return matched + (self._string[matched] == letter)
