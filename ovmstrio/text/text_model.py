"""Language model service: output parsing, grammar preparation, and text generation requests."""

from __future__ import annotations

import json
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.callers import current_caller
from ovmstrio.core.errors import InvalidField, Problem
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationLimits,
    Grammar,
    GrammarKind,
    Task,
    prompt_too_long,
)
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import OPTION, Detection
from ovmstrio.inference.engine.messages import CONFIG, CONTEXT_FILE, GRAMMAR_FIELD, PROMPT_FIELD, TOKENIZER_FILE
from ovmstrio.serving.hosted_service import HostedService
from ovmstrio.text.engine_client import AcceptedRequest, EngineClient
from ovmstrio.text.grammars import check_grammar, check_tools, to_compact_json, tool_call_grammar
from ovmstrio.text.parsing import Delta, StreamingParser, detect_parsers, ends_reasoning, make_parser, opens_reasoning
from ovmstrio.util.truncation import size_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import GenerationRequest, Padding, TokenIds, TokenRow
    from ovmstrio.serving.kind import LoadContext
    from ovmstrio.text.engine_client import OutputChunk
    from ovmstrio.text.engine_sharing import Engine
    from ovmstrio.text.grammars import ForcedCalls
    from ovmstrio.text.media import MediaLoader
    from ovmstrio.text.model_swap import ModelSwap

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------
# Output parsing
# ----------------------------------------------------------------------

_FAST_CHECK_SIZE: Final = 8192
"""Size of a grammar or of tools that is checked within a few milliseconds."""
_AUTO: Final = "auto"
_NONE: Final = "none"


class OutputParsing:
    """Output parsers and grammars of a model's requests.

    Args:
        spec: names the parsers, otherwise they are detected.
        facts: chat template and architectures of the model.

    Raises:
        ConfigError: a parser is unknown, or two are incompatible.
    """

    def __init__(self, spec: TextModelSpec, facts: Mapping[str, Any]) -> None:
        tools, reasoning = spec.tool_parser or _AUTO, spec.reasoning_parser or _AUTO
        self.parsers = detect_parsers(tools, reasoning, facts["chat_template"], facts["architectures"])
        self._tools, self._reasoning = self.parsers.tools, self.parsers.reasoning
        self._guided = spec.enable_tool_guided_generation
        self.has_reasoning = self._reasoning != _NONE

    def is_slow(self, asked: GenerationRequest) -> bool:
        """Return True if :meth:`prepare` takes more than a few milliseconds."""
        if asked.grammar is not None and len(asked.grammar.text) > _FAST_CHECK_SIZE:
            return True
        conversation = asked.prompt
        if not isinstance(conversation, Conversation) or not conversation.tools:
            return False
        return size_of(conversation.tools, _FAST_CHECK_SIZE) > _FAST_CHECK_SIZE

    def prepare(self, asked: GenerationRequest) -> tuple[GenerationRequest, OutputReader]:
        """Return the request for the engine, and the reader of its output.

        Raises:
            GrammarRefused: the requested grammar is not supported.
        """
        is_answer = False
        if asked.grammar is not None:
            check_grammar(asked.grammar)
            is_answer = self._is_of_answer(asked.grammar)
            asked = replace(asked, grammar=to_compact_json(asked.grammar))
        conversation = asked.prompt
        if not isinstance(conversation, Conversation):
            asked = _without_bad_words(asked)
            return asked, OutputReader(conversation=None, tools=_NONE, reasoning=_NONE)
        check_tools(conversation)
        has_tools = bool(conversation.tools) and conversation.tool_choice != _NONE
        tools, reasoning = self._tools if has_tools else _NONE, self._reasoning
        imposed = tool_call_grammar(conversation, self._tools, guided=self._guided)
        if imposed is not None and not imposed.forced and asked.grammar is not None:
            imposed = None
        if imposed is not None:
            asked = replace(asked, grammar=imposed.grammar)
            if imposed.forced:
                tools, reasoning = imposed.tool_parser, _NONE
        if not asked.parses_output or not asked.skips_special_tokens:
            tools = reasoning = _NONE
        reading = OutputReader(conversation, tools, reasoning, imposed, begins_answer=is_answer)
        asked = _without_bad_words(asked, has_special_markers=reading.keeps_special_tokens)
        if reading.keeps_special_tokens:
            asked = replace(asked, skips_special_tokens=False)
        return asked, reading

    def _is_of_answer(self, grammar: Grammar) -> bool:
        """Return True if the grammar of a complete text leaves no reasoning before the answer."""
        return grammar.kind is not GrammarKind.STRUCTURAL_TAG and not ends_reasoning(self._reasoning, grammar.text)


def _without_bad_words(asked: GenerationRequest, *, has_special_markers: bool = False) -> GenerationRequest:
    """Return a request whose grammar excludes its bad words; raise InvalidField if another grammar is in the way."""
    if not asked.bad_words:
        return asked
    obstacle = "response_format or imposed tool calls" if asked.grammar is not None else ""
    if has_special_markers:
        obstacle = "tool calls and reasoning of this model, whose markers are special tokens"
    if obstacle:
        raise InvalidField(f"bad_words cannot be combined with {obstacle}", field="bad_words", code=_UNSUPPORTED)
    # The library rejects a word that has another one, which excludes it anyway.
    words = set(asked.bad_words)
    words = {word for word in words if not any(other in word for other in words - {word})}
    tag = {"type": "structural_tag", "format": {"type": "any_text", "excludes": sorted(words)}}
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False), field="bad_words")
    return replace(asked, grammar=grammar)


class OutputReader:
    """Converts the output of one request to pieces.

    Args:
        conversation: the prompt; None for a completion.
        tools: tool parser.
        reasoning: reasoning parser.
        forced_calls: grammar of the tools.
        begins_answer: whether a grammar makes the text an answer, even if the prompt opens a reasoning block.
    """

    def __init__(
        self,
        conversation: Conversation | None,
        tools: str,
        reasoning: str,
        forced_calls: ForcedCalls | None = None,
        *,
        begins_answer: bool = False,
    ) -> None:
        self.forced_calls = forced_calls
        self._conversation = conversation
        self._tools = tools
        self._reasoning = reasoning
        self._is_parsed = conversation is not None and (tools, reasoning) != (_NONE, _NONE)
        self._begins_answer = begins_answer
        self._opens_reasoning = False
        self._parsers: dict[int, StreamingParser] = {}
        self._texts_with_calls: set[int] = set()
        self._ready: deque[GenerationChunk] = deque()
        self._counts: dict[int, ReasoningTokenCounter] = {}

    @property
    def keeps_special_tokens(self) -> bool:
        """True if the parser's markers are special tokens."""
        return self._is_parsed and self._parser().keeps_special_tokens

    def begin(self, prompt_end: str) -> None:
        """Set the end of the prompt, which may open a reasoning block."""
        can_open = self._is_parsed and not self._begins_answer
        self._opens_reasoning = can_open and opens_reasoning(self._reasoning, prompt_end)

    def _parser(self) -> StreamingParser:
        tools = () if self._conversation is None else self._conversation.tools
        return make_parser(self._tools, self._reasoning, tools=tools, opened=self._opens_reasoning)

    def next(self) -> GenerationChunk | None:
        """Return the next parsed piece, or None."""
        return self._ready.popleft() if self._ready else None

    def feed(self, made: OutputChunk) -> None:
        """Parse engine output into one or several pieces; the last one carries the finish reason."""
        if not self._is_parsed:
            piece = GenerationChunk(
                made.index,
                made.text,
                tokens=made.tokens,
                logprobs=tuple(made.logprobs),
                prompt_logprobs=tuple(made.prompt_logprobs),
                finish=made.finish,
                stop=made.stop,
            )
            self._ready.append(piece)
            return
        deltas, reasoning_tokens = self._parse(made)
        if self._conversation is not None and self._conversation.returns_first_call_only:
            deltas = [replace(delta, calls=tuple(call for call in delta.calls if not call.index)) for delta in deltas]
        last = len(deltas) - 1
        for position, delta in enumerate(deltas):
            self._ready.append(
                GenerationChunk(
                    index=made.index,
                    text=delta.text,
                    reasoning=delta.reasoning,
                    calls=delta.calls,
                    tokens=0 if position else made.tokens,
                    reasoning_tokens=0 if position else reasoning_tokens,
                    logprobs=() if position else tuple(made.logprobs),
                    prompt_logprobs=() if position else tuple(made.prompt_logprobs),
                    finish=self._finish(made) if position == last else None,
                    stop=made.stop if position == last else "",
                )
            )

    def _parse(self, made: OutputChunk) -> tuple[list[Delta], int]:
        """Return the parsed deltas, at least one, and the number of reasoning tokens."""
        parser = self._parsers.get(made.index)
        if parser is None:
            parser = self._parsers[made.index] = self._parser()
            self._counts[made.index] = ReasoningTokenCounter()
        # Reasoning tokens are counted per step, so joined steps are parsed one by one.
        parts = [(made.text, made.tokens)] if self._reasoning == _NONE else made.parts
        deltas: list[Delta] = []
        reasoning_tokens = 0
        for text, tokens in parts:
            parsed = parser.feed(text)
            reasoning_tokens += self._counts[made.index].take(parsed, tokens)
            deltas += parsed
        if made.finish is not None:
            deltas += parser.finish()
        if any(delta.calls for delta in deltas):
            self._texts_with_calls.add(made.index)
        return deltas or [Delta()], reasoning_tokens

    def _finish(self, made: OutputChunk) -> Finish | None:
        if made.finish is Finish.STOP and made.index in self._texts_with_calls:
            return Finish.TOOL_CALLS
        return made.finish


class ReasoningTokenCounter:
    """Counts reasoning tokens; tokens without text, such as markers, count with the text before them."""

    __slots__ = ("_is_reasoning", "_undecided")

    def __init__(self) -> None:
        self._is_reasoning: bool | None = None
        self._undecided = 0

    def take(self, deltas: Sequence[Delta], tokens: int) -> int:
        """Count tokens with their deltas; return how many reasoning tokens became certain."""
        if any(delta.text or delta.calls for delta in deltas):
            self._is_reasoning = False
        elif any(delta.reasoning for delta in deltas):
            self._is_reasoning = True
        if self._is_reasoning is None:
            self._undecided += tokens
            return 0
        tokens, self._undecided = tokens + self._undecided, 0
        return tokens if self._is_reasoning else 0


# ----------------------------------------------------------------------
# Speculative decoding checks
# ----------------------------------------------------------------------

_UNSUPPORTED: Final = "unsupported_parameter"
_REQUIREMENTS: Final[Mapping[str, str]] = {
    "num_assistant_tokens": "a model that drafts (draft_models_path) or prompt_lookup",
    "assistant_confidence_threshold": "a model that drafts (draft_models_path)",
    "max_ngram_size": "prompt_lookup",
}


def check_speculative_options(spec: TextModelSpec, asked: GenerationRequest) -> None:
    """Check a request's parameters against the model's speculative decoding (draft model or prompt lookup).

    Raises:
        InvalidField: a parameter is not supported.
    """
    drafts, looks_up = spec.draft_path is not None, spec.looks_up
    has = {
        "num_assistant_tokens": drafts or looks_up,
        "assistant_confidence_threshold": drafts and not looks_up,
        "max_ngram_size": looks_up,
    }
    for field, is_available in has.items():
        if not is_available and getattr(asked.sampling, field) is not None:
            message = f"{field} is not supported: this model is served without {_REQUIREMENTS[field]}; leave it out"
            raise InvalidField(message, field=field, code=_UNSUPPORTED)
    proposed = asked.sampling.num_assistant_tokens
    if proposed is not None and proposed > spec.max_assistant_tokens:
        message = f"num_assistant_tokens is at most {spec.max_assistant_tokens} here, a half of max_num_batched_tokens"
        raise InvalidField(message, field="num_assistant_tokens", got=str(proposed))
    if (drafts or looks_up) and asked.sampling.best_of > 1:
        raise InvalidField(
            "best_of above 1 is not supported for this model, whose tokens are proposed and then checked; leave it out",
            field="best_of",
            code=_UNSUPPORTED,
        )
    if drafts and asked.logprobs:
        raise InvalidField(
            "logprobs are not supported for this model: the library has none of tokens that another one has drafted",
            field="logprobs",
            code=_UNSUPPORTED,
        )


# ----------------------------------------------------------------------
# The service
# ----------------------------------------------------------------------

PLATFORM = "openvino_genai"
_DOCUMENTS: Final = "documents"


class RunningGeneration:
    """A running request; see :class:`ovmstrio.core.generation.Generation`."""

    def __init__(self, opened: AcceptedRequest, reading: OutputReader) -> None:
        self._answer = opened.answer
        self._reading = reading
        reading.begin(opened.prompt_end)
        self.prompt_tokens = opened.prompt_tokens
        self.cached_tokens = opened.own_cached_tokens

    def listen(self, take: Callable[[Iterable[GenerationChunk]], bool]) -> None:
        """Pass pieces to ``take``, as :meth:`Generation.listen`."""
        self._answer.listener = lambda unread: take(self._parsed(unread))

    def _parsed(self, unread: Iterable[OutputChunk]) -> Iterator[GenerationChunk]:
        for made in unread:
            self._reading.feed(made)
            while (piece := self._reading.next()) is not None:
                yield piece

    # Not a generator: callers that break out of a loop would have to close it.
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        while (piece := self._reading.next()) is None:
            made = await self._answer.take()
            if made is None:
                raise StopAsyncIteration
            self._reading.feed(made)
        return piece


def _request_error(error: InvalidField, asked: GenerationRequest, forced_calls: ForcedCalls | None) -> InvalidField:
    """Return an error of the engine with the name of the request's field."""
    if error.field == GRAMMAR_FIELD and forced_calls is not None:
        return forced_calls.refusal(error)
    field = asked.prompt_field
    if error.field == GRAMMAR_FIELD:
        field = GRAMMAR_FIELD if asked.grammar is None else asked.grammar.field
    named = error.with_message(error.message.replace(f"{error.field}: ", f"{field}: ", 1))
    named.field = field
    return named


class TextModel(HostedService):
    """One language model; a :class:`TextGenerator` and a :class:`PromptTokenizer`.

    Args:
        spec: configuration.
        process: the engine.
        link: request multiplexer of the engine.
        swap: the model's replacement during a reload.
        media: loader of the images of messages.
    """

    def __init__(
        self,
        spec: TextModelSpec,
        process: Engine,
        link: EngineClient,
        swap: ModelSwap[TextModel],
        media: MediaLoader,
    ) -> None:
        super().__init__()
        self._media = media
        self._swap = swap
        self._spec = spec
        self._process = process
        self._link = link
        self._limits = GenerationLimits(
            context_length=process.facts["context_length"],
            max_tokens_limit=spec.max_tokens_limit,
            best_of_limit=spec.best_of_limit,
            vocabulary_size=process.facts["vocabulary_size"],
            longest_token=process.facts["longest_token"],
            takes_images=process.facts["takes_images"],
        )
        self._reading = OutputParsing(spec, process.facts)
        self._metadata = ServableMetadata(spec.name, PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """Metadata without tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """Text generation."""
        return frozenset({Task.TEXT_GENERATION})

    @property
    def parent(self) -> str:
        """Name of the model that this one is a LoRA adapter of; empty without adapter."""
        return self._spec.parent

    @property
    def limits(self) -> GenerationLimits:
        """Request limits."""
        return self._limits

    def report_detections(self, context: LoadContext) -> None:
        """Report the settings that loading detected, and what is wrong with them."""
        spec, facts, parsers = self._spec, self._process.facts, self._reading.parsers
        template, length = facts["chat_template_file"], facts["context_source"]
        if spec.path.suffix == ".gguf":  # the other files are derived from it
            converted = {TOKENIZER_FILE: spec.path.name, CONTEXT_FILE: spec.path.name}
            template, length = converted.get(template, template), converted.get(length, length)
        mode = spec.chat_template_mode if template else None
        template = template or "default"
        tools = CONFIG if parsers.is_by_architecture else template
        for detection in (
            Detection("max_model_len", self._limits.context_length, length),
            Detection("chat_template", mode, template),
            Detection("tool_parser", parsers.tools, OPTION if spec.tool_parser else tools),
            Detection("reasoning_parser", parsers.reasoning, OPTION if spec.reasoning_parser else template),
        ):
            context.detect(detection)
        if parsers.is_unknown:
            message = "the chat template has tools in a format without a parser"
            hint = "set tool_parser; calls are read as JSON until then"
            self._warn(context, Problem(message, path="tool_parser", found=template, suggestion=hint))
        if facts["token_bound"] is not None:
            message = f"the tokenizer keeps {facts['token_bound']} tokens of longer texts"
            hint = "convert the tokenizer with openvino_tokenizers; longer prompts are refused until then"
            self._warn(context, Problem(message, file=str(spec.path), suggestion=hint))

    def _warn(self, context: LoadContext, problem: Problem) -> None:
        log.warning("model limited", model=self._spec.name, reason=problem.message, hint=problem.suggestion)
        context.warn(replace(problem, severity="warning"))

    @property
    def chat_template(self) -> str:
        """Source of the chat template."""
        template: str = self._process.facts["chat_template"]
        return template

    @property
    def architecture(self) -> str:
        """First architecture of ``config.json``; empty if unknown."""
        return next(iter(self._process.facts["architectures"]), "")

    @property
    def has_reasoning(self) -> bool:
        """True if the model's reasoning is parsed."""
        return self._reading.has_reasoning

    @property
    def unready_reason(self) -> str:
        """Why the model is unready; empty if it is ready."""
        return self._swap.unready_reason or self._process.unready_reason

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return self._process.pid

    @property
    def facts(self) -> dict[str, Any]:
        """State of the engine, for introspection."""
        return {"engine process": self._process.place, **self._link.facts}

    @property
    def open_requests(self) -> int:
        """Number of running and queued requests."""
        return self._link.open

    @asynccontextmanager
    async def generate(self, asked: GenerationRequest) -> AsyncIterator[RunningGeneration]:
        """Generate, as :meth:`TextGenerator.generate`."""
        if isinstance(asked.prompt, Conversation) and not asked.prompt.has_loaded_images:
            self._check(asked)
            async with (
                self._media.loading(asked.prompt) as conversation,
                self.generate(replace(asked, prompt=conversation)) as generation,
            ):
                yield generation
            return
        async with self._swap.using() as successor:
            if successor is not None:
                async with successor.generate(asked) as generation:
                    yield generation
                return
            self._check(asked)
            if (caller := current_caller.get()) is not None:
                asked = replace(asked, cache_salt=json.dumps([caller.proof, caller.name, asked.cache_salt]))
            prepare = partial(self._reading.prepare, asked)
            is_slow = self._reading.is_slow(asked)
            prepared, reading = await trio.to_thread.run_sync(prepare) if is_slow else prepare()
            process = await self._process.ready()
            try:
                async with self._link.ask(process, prepared) as opened:
                    yield RunningGeneration(opened, reading)
            except InvalidField as error:
                if error.field not in {GRAMMAR_FIELD, PROMPT_FIELD}:
                    raise
                raise _request_error(error, prepared, reading.forced_calls) from error

    def _check(self, asked: GenerationRequest) -> None:
        """Check a request against the model's limits."""
        limits, sampling = self._limits, asked.sampling
        if isinstance(asked.prompt, Conversation) and asked.prompt.images and not limits.takes_images:
            raise InvalidField("this model accepts text only", field=asked.prompt.images[0].field)
        if asked.prompt_characters > limits.max_characters:
            raise prompt_too_long(limits, asked.prompt_field, asked.prompt_characters)
        options = asked.prompt.template_options if isinstance(asked.prompt, Conversation) else {}
        if options.get(_DOCUMENTS) and _DOCUMENTS not in self._process.facts["chat_template"]:
            message = "the chat template of this model has no documents; write the documents into a message"
            raise InvalidField(message, field=_DOCUMENTS, code=_UNSUPPORTED)
        texts = max(asked.n, sampling.best_of)
        check_speculative_options(self._spec, asked)
        if texts > limits.best_of_limit:
            field = "n" if asked.n > sampling.best_of else "best_of"
            raise InvalidField(f"{field} is at most {limits.best_of_limit} here", field=field, got=str(texts))
        if asked.n > sampling.best_of > 1:
            raise InvalidField("n is at most best_of", field="n", got=str(asked.n))
        most = limits.max_tokens_limit
        if most is not None and sampling.max_tokens is not None and sampling.max_tokens > most:
            message = f"max_tokens is at most {most} for this model"
            raise InvalidField(message, field="max_tokens", got=str(sampling.max_tokens))

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Return the tokens of each text, as :meth:`Tokenizer.tokenize`."""
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        if max_length is not None:
            options["max_length"] = max_length
        async with self._swap.using() as successor:
            if successor is not None:
                return await successor.tokenize(texts, padding=padding, **options)
            if padding is not None:
                options["padding"] = padding.value
            return await self._link.tokenize(await self._process.ready(), texts, **options)

    async def tokenize_conversation(self, conversation: Conversation) -> TokenRow:
        """Return the tokens of a prompt, as :meth:`PromptTokenizer.tokenize_conversation`."""
        if not conversation.has_loaded_images:
            async with self._media.loading(conversation) as loaded:
                return await self.tokenize_conversation(loaded)
        async with self._swap.using() as successor:
            if successor is not None:
                return await successor.tokenize_conversation(conversation)
            return await self._link.tokenize_prompt(await self._process.ready(), conversation)

    async def detokenize(self, tokens: TokenIds) -> str:
        """Return the text of tokens, as :meth:`PromptTokenizer.detokenize`."""
        return (await self._texts(tokens, is_joined=True))[0] if tokens else ""

    async def token_texts(self, tokens: TokenRow) -> list[str]:
        """Return the text of each token, as :meth:`PromptTokenizer.token_texts`."""
        return await self._texts(tokens, is_joined=False)

    async def _texts(self, tokens: TokenRow, *, is_joined: bool) -> list[str]:
        async with self._swap.using() as successor:
            if successor is not None:
                return await successor._texts(tokens, is_joined=is_joined)  # noqa: SLF001 - of the same class
            return await self._link.detokenize(await self._process.ready(), tokens, is_joined=is_joined)
