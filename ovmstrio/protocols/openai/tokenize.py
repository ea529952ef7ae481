"""Endpoints ``/tokenize`` and ``/detokenize``: tokens of texts (OVMS), of a prompt or a chat (vLLM), and their text.

``text`` selects OVMS's form, ``prompt`` and ``messages`` select vLLM's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import trio

from ovmstrio.core.errors import ErrorList, InvalidField, NotSupported
from ovmstrio.core.generation import Detokenizer, Padding, PromptTokenizer, Tokenizer
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_output import array_pieces
from ovmstrio.protocols.openai.api import PREFIXES
from ovmstrio.protocols.openai.chat import read_conversation
from ovmstrio.protocols.openai.fields import MAX_PROMPT_TOKENS, Fields, are_token_ids, shown
from ovmstrio.protocols.openai.known_fields import DETOKENIZE, TOKENIZE
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.util.truncation import MAX_ITEMS, MAX_TOKENIZED_CHARACTERS, cut, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.generation import Conversation, TokenRow
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_MAX_INLINE_TOKENS: Final = 50_000  # Token count that is encoded within a few milliseconds


class _ParsedRequest(NamedTuple):
    texts: Sequence[str]
    is_list: bool
    add_special_tokens: bool
    max_length: int | None
    padding: Padding | None


def tokenize_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def tokenize(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, TOKENIZE, needs_model=False)
        is_prompt = any(body.document.get(name) is not None for name in _PROMPTS)
        read: Callable[[Mapping[str, Any]], _PromptRequest | _ParsedRequest] = _read_prompt if is_prompt else _read
        parsed = await parse_off_loop(partial(read, body.document), body)
        with await api.call(request, body.model, None) as call:
            service = call.service
            if not isinstance(service, Tokenizer):
                raise NotSupported(f'the service "{cut(body.model, 80)}" has no tokenizer')
            if isinstance(parsed, _PromptRequest):
                content = await _tokenize_prompt(service, parsed)
            else:
                content = await _tokenize_texts(service, parsed)
            call.event.sent = len(content)
        return HttpAnswer(200, JSON_TYPE, content)

    async def detokenize(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, DETOKENIZE, needs_model=False)
        tokens = _read_tokens(body.document)
        with await api.call(request, body.model, None) as call:
            service = call.service
            if not isinstance(service, Detokenizer):
                raise NotSupported(f'the service "{cut(body.model, 80)}" has no detokenizer')
            answer = json_response({"prompt": await service.detokenize(tokens)})
            call.event.sent = len(answer.content)
        return answer

    # Clients of vLLM use no prefix.
    paths = (("/tokenize", tokenize), ("/detokenize", detokenize))
    return [rule for path, view in paths for rule in api.rules(path, "POST", view, prefixes=("", *PREFIXES))]


async def _tokenize_texts(service: Tokenizer, parsed: _ParsedRequest) -> bytes:
    rows = await service.tokenize(
        parsed.texts,
        add_special_tokens=parsed.add_special_tokens,
        max_length=parsed.max_length,
        padding=parsed.padding,
    )
    write = partial(_write, rows, is_list=parsed.is_list)
    is_large = sum(map(len, rows)) > _MAX_INLINE_TOKENS
    return await trio.to_thread.run_sync(write) if is_large else write()


# ----------------------------------------------------------------------
# vLLM's form
# ----------------------------------------------------------------------

_PROMPTS: Final = ("prompt", "messages")


class _PromptRequest(NamedTuple):
    """Prompt or conversation; ``has_texts`` requests the text of each token."""

    prompt: str | Conversation
    add_special_tokens: bool
    has_texts: bool


async def _tokenize_prompt(service: Tokenizer, parsed: _PromptRequest) -> bytes:
    if not isinstance(service, PromptTokenizer) and (parsed.has_texts or not isinstance(parsed.prompt, str)):
        field = "return_token_strs" if isinstance(parsed.prompt, str) else "messages"
        raise InvalidField(f"{field} is not supported for models without a chat template", field=field)
    if isinstance(parsed.prompt, str):
        (row,) = await service.tokenize([parsed.prompt], add_special_tokens=parsed.add_special_tokens)
    else:
        row = await cast("PromptTokenizer", service).tokenize_conversation(parsed.prompt)
    texts = await cast("PromptTokenizer", service).token_texts(row) if parsed.has_texts else None
    limits = service.limits.context_length if isinstance(service, PromptTokenizer) else None
    document = {"count": len(row), "max_model_len": limits, "tokens": np.asarray(row).tolist(), "token_strs": texts}
    write = partial(json_response, document)
    return (await trio.to_thread.run_sync(write) if len(row) > _MAX_INLINE_TOKENS else write()).content


def _read_prompt(document: Mapping[str, Any]) -> _PromptRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    adds, has_texts = fields.flag("add_special_tokens"), bool(fields.flag("return_token_strs"))
    prompt: str | Conversation = ""
    if fields.get("messages") is None:
        prompt = fields.text("prompt") or ""
        if weight_of(prompt) > MAX_TOKENIZED_CHARACTERS:
            message = f"prompt: expected at most {MAX_TOKENIZED_CHARACTERS} bytes"
            fields.refuse("prompt", message, got=str(weight_of(prompt)))
    else:
        prompt = read_conversation(fields)
        if adds:
            message = "add_special_tokens is not possible with messages: the template adds them"
            fields.refuse("add_special_tokens", message)
    given = [name for name in ("text", *_PROMPTS) if fields.get(name) is not None]
    if len(given) > 1:
        fields.refuse(given[-1], f"{' and '.join(given)} exclude each other")
    for name in _TEXT_FIELDS:
        if fields.get(name):
            fields.refuse(name, f"{name} is only possible with text")
    TOKENIZE.check(fields)
    errors.raise_if_any()
    return _PromptRequest(prompt, adds is not False, has_texts)


_TEXT_FIELDS: Final = ("max_length", "pad_to_max_length", "padding_side")


def _read_tokens(document: Mapping[str, Any]) -> tuple[int, ...]:
    errors = ErrorList()
    fields = Fields(document, errors)
    tokens = fields.get("tokens")
    if tokens is None:
        fields.refuse("tokens", "tokens field is required", code="missing_required_parameter")
    elif not isinstance(tokens, list) or (tokens and not are_token_ids(tokens, 2**31)):
        fields.refuse("tokens", "tokens: expected token ids", got=shown(tokens))
    elif len(tokens) > MAX_PROMPT_TOKENS:
        fields.refuse("tokens", f"tokens: expected at most {MAX_PROMPT_TOKENS} tokens", got=str(len(tokens)))
    DETOKENIZE.check(fields)
    errors.raise_if_any()
    return tuple(tokens)


# ----------------------------------------------------------------------
# OVMS's form
# ----------------------------------------------------------------------


def _write(rows: Sequence[TokenRow], *, is_list: bool) -> bytes:
    """Encode the response; many tokens are encoded in several short calls."""
    pieces = [b'{"tokens":[' if is_list else b'{"tokens":']
    for number, row in enumerate(rows):
        pieces.append(b"," if number else b"")
        pieces += array_pieces(np.asarray(row, np.int64))
    pieces.append(b"]}" if is_list else b"}")
    return b"".join(pieces)


def _read(document: Mapping[str, Any]) -> _ParsedRequest:
    errors = ErrorList()
    fields = Fields(document, errors)
    given = fields.get("text")
    texts = _read_texts(fields, given)
    adds = fields.flag("add_special_tokens")
    max_length = fields.unsigned("max_length", minimum=1)
    pads = fields.flag("pad_to_max_length")
    side = fields.name_text("padding_side")
    if side is not None and side not in {each.value for each in Padding}:
        fields.refuse("padding_side", "padding_side should be either left or right", got=shown(side))
    if pads and max_length is not None and max_length * len(texts) > MAX_TOKENIZED_CHARACTERS:
        message = f"max_length: expected at most {MAX_TOKENIZED_CHARACTERS} tokens per request, including padding"
        fields.refuse("max_length", message, got=str(max_length * len(texts)))
    for name in _CHAT_FIELDS:
        if fields.get(name):
            fields.refuse(name, f"{name} is only possible with prompt or messages")
    TOKENIZE.check(fields)
    errors.raise_if_any()
    padding = Padding(side or Padding.RIGHT.value) if pads else None
    return _ParsedRequest(texts, isinstance(given, list), adds is not False, max_length, padding)


_CHAT_FIELDS: Final = (
    *("return_token_strs", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"),
    "tool_choice",
)


def _read_texts(fields: Fields, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if given is None:
        fields.refuse("text", "text field is required", code="missing_required_parameter")
    elif not isinstance(texts, list):
        fields.refuse("text", "text should be string or array of strings", got=shown(given))
    elif len(texts) > MAX_ITEMS:
        fields.refuse("text", f"text: expected at most {MAX_ITEMS} texts", got=str(len(texts)))
    elif not all(isinstance(each, str) for each in texts):
        fields.refuse("text", "text should be string or array of strings", got=shown(given))
    elif (size := sum(map(weight_of, texts))) > MAX_TOKENIZED_CHARACTERS:
        message = f"text: expected at most {MAX_TOKENIZED_CHARACTERS} bytes per request"
        fields.refuse("text", message, got=f"{size}; send several requests")
    else:
        return texts
    return []
