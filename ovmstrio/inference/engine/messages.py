"""Message format between a server and its engine processes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import orjson

from ovmstrio.core.errors import (
    ContextExceeded,
    InvalidField,
    InvalidRequest,
    ModelFailure,
    NotSupported,
    Overloaded,
    ServerError,
)
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Image,
    Prompt,
    Sampling,
)
from ovmstrio.util.truncation import encode_text

CONFIG: Final = "config.json"
"""File in a model folder with architectures and context length."""

LANGUAGE_MODEL_FILE: Final = "openvino_language_model.xml"
"""File of a model that takes images, in place of ``openvino_model.xml``."""

CONTEXT_FILE: Final = "ovmstrio.json"
"""File in a converted model folder: ``{"context_length": 2048}``."""

TOKENIZER_FILE: Final = "openvino_tokenizer.xml"
"""File of the tokenizer in a model folder, which may contain a chat template."""

ADAPTER_FILE: Final = "adapter_model.safetensors"
"""File of a LoRA adapter in peft's format."""

VOICE_FILES: Final = "*.onnx"
"""Pattern of the network of a Piper voice; its configuration has ``.json`` appended to the name."""

FINISH_REASONS: Final = tuple(Finish)
"""Finish reasons by their number in output rows."""

LOADED: Final = "loaded"
"""Answer to the first message, with facts of the model."""

FAILED: Final = "failed"
"""Answer to the first message, with the reason."""

ACCEPTED: Final = "accepted"
"""Answer when a request runs: prompt tokens, end of the rendered prompt, cached prompt tokens, those of its salt."""

REJECTED: Final = "refused"
"""Answer to a rejected request, with an error."""

TOKENS: Final = "tokens"
"""Answer to a tokenization request: tokens of all texts in one array, and the count per text."""

PROMPT_FIELD: Final = "messages"
"""Field of errors of a prompt, which the server replaces by the request's own."""

GRAMMAR_FIELD: Final = "response_format"
"""Field of errors of a grammar, which the server replaces by the request's own."""

TEXTS: Final = "texts"
"""Answer to a detokenization request: texts."""

CANCELLED: Final = ModelFailure("the request was cancelled")
"""Error of a request cancelled before it was answered."""

PART: Final = "part"
"""Answer with the next part: transcript of a window, or audio of a sentence."""

_CHAT: Final = "chat"
_TEXT: Final = "text"
_IDS: Final = "ids"


def encode_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Encode texts as one buffer, which a channel copies without parsing; safe in a thread, as each call is short."""
    return {"text": encode_text("".join(texts)), "lengths": orjson.dumps(list(map(len, texts)))}


def decode_texts(packed: dict[str, Any]) -> list[str]:
    """Decode the result of :func:`encode_texts`."""
    text, texts, start = packed["text"].decode(), [], 0
    for length in orjson.loads(packed["lengths"]):
        texts.append(text[start : start + length])
        start += length
    return texts


def encode_request(request: GenerationRequest) -> dict[str, Any]:
    """Encode a request without its deadline: prompt texts are one buffer, the rest is JSON."""
    sampling = {each.name: getattr(request.sampling, each.name) for each in fields(Sampling)}
    grammar = None if request.grammar is None else [request.grammar.kind.value, request.grammar.text]
    prompt, texts = _encode_prompt(request.prompt)
    plain = {
        "prompt": prompt,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "stop": list(request.stop),
        "keeps_stop": request.includes_stop,
        "n": request.n,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "echo": request.echo,
        "grammar": grammar,
        "skips_special_tokens": request.skips_special_tokens,
        "adds_special_tokens": request.adds_special_tokens,
        "prompt_limit": request.prompt_limit,
        "truncates_end": request.truncates_end,
        "cache_salt": request.cache_salt,
    }
    try:
        data = orjson.dumps(plain)
    except orjson.JSONEncodeError:
        # A lone surrogate, or an integer of more than 64 bits.
        data = json.dumps(plain).encode()
    images = request.prompt.images if isinstance(request.prompt, Conversation) else ()
    files = {"images": [[image.source, image.field] for image in images]} if images else {}
    return {"n": request.n, "plain": data, **encode_texts(texts), **files}


def decode_request(encoded: dict[str, Any]) -> GenerationRequest:
    """Decode the result of :func:`encode_request`."""
    plain = json.loads(encoded["plain"])
    grammar, sampling = plain["grammar"], plain["sampling"]
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return GenerationRequest(
        prompt=_decode_prompt(decode_texts(encoded), encoded.get("images", ()), *plain["prompt"]),
        sampling=Sampling(**sampling),
        stop=tuple(plain["stop"]),
        includes_stop=plain["keeps_stop"],
        n=plain["n"],
        logprobs=plain["logprobs"],
        top_logprobs=plain["top_logprobs"],
        prompt_logprobs=plain["prompt_logprobs"],
        echo=plain["echo"],
        grammar=None if grammar is None else Grammar(GrammarKind(grammar[0]), grammar[1]),
        skips_special_tokens=plain["skips_special_tokens"],
        adds_special_tokens=plain["adds_special_tokens"],
        prompt_limit=plain["prompt_limit"],
        truncates_end=plain["truncates_end"],
        cache_salt=plain["cache_salt"],
        deadline=math.inf,
    )


def _encode_prompt(prompt: Prompt) -> tuple[list[Any], list[str]]:
    if isinstance(prompt, str):
        return [_TEXT], [prompt]
    if isinstance(prompt, tuple):
        return [_IDS, prompt], []
    texts = [str(message.get("content") or "") for message in prompt.messages]
    messages = [{**message, "content": ""} for message in prompt.messages]
    tools = [dict(tool) for tool in prompt.tools]
    options = dict(prompt.template_options)
    parts = [messages, tools, prompt.tool_choice, prompt.tool_name, options, prompt.continues_final_message]
    return [_CHAT, *parts], texts


def _decode_prompt(texts: Sequence[str], images: Sequence[Any], kind: str, *parts: Any) -> Prompt:
    if kind == _TEXT:
        return texts[0]
    if kind == _IDS:
        return tuple(parts[0])
    messages, tools, choice, name, options, continues = parts
    for message, text in zip(messages, texts, strict=True):
        message["content"] = text
    return Conversation(
        tuple(messages),
        tuple(tools),
        choice,
        name,
        options,
        continues_final_message=continues,
        images=tuple(Image(*each) for each in images),
    )


_FAILURES: Final[dict[str, type[ServerError]]] = {
    each.__name__: each
    for each in (ContextExceeded, InvalidField, InvalidRequest, ModelFailure, NotSupported, Overloaded)
}
_DETAILS: Final = ("field", "code", "retry_after_seconds")


def encode_failure(error: ServerError) -> list[Any]:
    """Encode an error; an unknown class becomes ModelFailure."""
    name = type(error).__name__
    details = {each: getattr(error, each) for each in _DETAILS if hasattr(error, each)}
    return [name, error.message, details] if name in _FAILURES else [ModelFailure.__name__, error.message, {}]


def decode_failure(plain: list[Any]) -> ServerError:
    """Decode the result of :func:`encode_failure`."""
    name, message, details = plain
    return _FAILURES[name](message, **details)
