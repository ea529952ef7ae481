"""OpenAI endpoint ``/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ContextExceeded, ErrorList
from ovmstrio.protocols.openai.fields import (
    MAX_PROMPT_TOKENS,
    MAX_TOP_LOGPROBS,
    Fields,
    are_token_ids,
    check_length,
    make_request,
    read_max_tokens,
    read_prompt_logprobs,
    read_stream_options,
    refuse_in_stream,
    shown,
)
from ovmstrio.protocols.openai.known_fields import COMPLETIONS
from ovmstrio.protocols.openai.text_endpoint import (
    ChunkStream,
    ParsedRequest,
    ResponseBuilder,
    prompt_logprobs_document,
    response_head,
    token_text,
    top_logprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.generation import Finish, GenerationChunk, GenerationLimits, TokenIds, TokenLogprob
    from ovmstrio.protocols.openai.api import Body
    from ovmstrio.protocols.openai.text_endpoint import Usage

# Responses


def _head(model: str) -> dict[str, Any]:
    return response_head("cmpl", "text_completion", model)


class _CompletionBuilder(ResponseBuilder):
    def document(self, usage: Usage) -> Mapping[str, Any]:
        choices = [
            _choice(index, "".join(text.text), _logprobs(text.logprobs) if self._has_logprobs else None, text.finish)
            for index, text in enumerate(self._texts)
        ]
        if self._has_prompt_logprobs:
            texts = self._parsed.requests[0].n
            for index, choice in enumerate(choices):
                prompt = self._texts[index - index % texts].prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs_document(prompt)
        return {**_head(self._model), "choices": choices, "usage": usage.document()}


class _CompletionStream(ChunkStream):
    def __init__(self, model: str, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]) -> None:
        super().__init__(_head(model), parsed, write_error)

    def write(self, index: int, piece: GenerationChunk, usage: Usage) -> bytes:
        if self._has_text_only(piece):
            return self._text_event(index, b'"text":', piece.text) if piece.text else b""
        piece = self._parsed.returned(piece)
        if not piece.text and not piece.finish and not piece.logprobs:
            return b""
        logprobs = _logprobs(piece.logprobs) if self._has_logprobs and piece.logprobs else None
        return self._event([_choice(index, piece.text, logprobs, piece.finish)], usage)


def _choice(index: int, text: str, logprobs: Any, finish: Finish | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else finish.value,
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """Return token log probabilities and text offsets; the first token of a prompt has no probability."""
    return {
        "tokens": [token_text(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [top_logprobs(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


# Endpoint

_MAX_PROMPTS: Final = 1024


class Completions:
    """Endpoint."""

    known_fields = COMPLETIONS

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: prompts, as text or token ids, and sampling parameters."""
        errors = ErrorList()
        fields = Fields(document, errors)
        options = read_stream_options(fields, is_stream=is_stream)
        echo = bool(fields.flag("echo"))
        max_tokens = read_max_tokens(fields, limits, "max_tokens", minimum=0 if echo else 1)
        prompts = _read_prompts(fields, limits, errors)
        top = _read_logprobs(fields, is_stream=is_stream)
        request = make_request(
            fields,
            limits,
            "",
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=top > 0,
            # The most likely token is known without a second reading of the text, in many cases.
            top_logprobs=top if top > 1 else 0,
            prompt_logprobs=read_prompt_logprobs(fields, is_stream=is_stream),
            echo=echo,
            deadline=deadline,
        )
        shows_token_ids = bool(fields.flag("return_tokens_as_token_ids"))
        COMPLETIONS.check(fields)
        errors.raise_if_any()
        place = "prompt[{}]" if _is_batch(fields.get("prompt")) else "prompt"
        requests = tuple(
            replace(request, prompt=prompt, prompt_field=place.format(number)) for number, prompt in enumerate(prompts)
        )
        return ParsedRequest(
            requests, options.includes_usage, options.has_continuous_usage, shows_token_ids=shows_token_ids
        )

    def response_builder(self, body: Body, parsed: ParsedRequest) -> _CompletionBuilder:
        """Create a response builder."""
        return _CompletionBuilder(body.model, parsed)

    def response_stream(
        self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]
    ) -> _CompletionStream:
        """Create a chunk writer."""
        return _CompletionStream(body.model, parsed, write_error)


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _read_logprobs(fields: Fields, *, is_stream: bool) -> int:
    """Return the number of most likely tokens at each place; 0 is that of the chosen ones, as in OVMS."""
    value = fields.get("logprobs")
    if value is None or isinstance(value, bool):
        return int(value or 0)
    message = f"logprobs accepts integer values from 0 to {MAX_TOP_LOGPROBS}"
    count = max(1, fields.integer("logprobs", message, range(MAX_TOP_LOGPROBS + 1)) or 0)
    if count > 1:
        refuse_in_stream(fields, "logprobs", " above 1", is_stream=is_stream)
    return count


def _read_prompts(fields: Fields, limits: GenerationLimits, errors: ErrorList) -> list[str | TokenIds]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        if not prompt:
            fields.refuse("prompt", "prompt is missing", got="an empty string")
        check_length(prompt, limits, "prompt", errors)
        return [prompt]
    if prompt is None:
        fields.refuse("prompt", "prompt is missing", code="missing_required_parameter")
        return []
    if not isinstance(prompt, list):
        fields.refuse(
            "prompt",
            "prompt is not a string",
            got=f"{shown(prompt)}; expected a string, or an array of strings or token ids",
        )
        return []
    if prompt and isinstance(prompt[0], int):
        return _read_tokens(fields, prompt, "prompt", limits, errors)
    if not 0 < len(prompt) <= _MAX_PROMPTS:
        fields.refuse("prompt", f"prompt: expected 1 to {_MAX_PROMPTS} prompts", got=str(len(prompt)))
        return []
    return [parsed for at, each in enumerate(prompt) for parsed in _read_one(fields, each, at, limits, errors)]


def _read_one(
    fields: Fields, prompt: Any, at: int, limits: GenerationLimits, errors: ErrorList
) -> list[str | TokenIds]:
    name = f"prompt[{at}]"
    if prompt and isinstance(prompt, str):
        check_length(prompt, limits, name, errors)
        return [prompt]
    if isinstance(prompt, list):
        return _read_tokens(fields, prompt, name, limits, errors)
    fields.refuse(
        name,
        f"{name} is neither a string nor an array of token ids",
        got="an empty string" if prompt == "" else shown(prompt),
    )
    return []


def _read_tokens(
    fields: Fields, prompt: list[Any], name: str, limits: GenerationLimits, errors: ErrorList
) -> list[str | TokenIds]:
    is_truncated = fields.get("truncate_prompt_tokens") is not None
    most_tokens = MAX_PROMPT_TOKENS if limits.context_length is None or is_truncated else limits.context_length
    if len(prompt) > most_tokens:
        message = f"Number of prompt tokens: {len(prompt)} exceeds model max length: {most_tokens}"
        errors.add(ContextExceeded(message, field=name))
        return []
    most = limits.vocabulary_size or 2**31
    if not are_token_ids(prompt, most):
        fields.refuse(name, f"{name}: expected at least one token id, from 0 to {most - 1}")
        return []
    return [tuple(prompt)]
