"""What a server and its engines say to each other: requests as plain data, and the words of their messages."""

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
    Prompt,
    Sampling,
)
from ovmstrio.util.truncation import encode_text

__all__ = [
    "ACCEPTED",
    "CANCELLED",
    "CONTEXT_FILE",
    "FAILED",
    "FINISHES",
    "LOADED",
    "PART",
    "REFUSED",
    "TOKENS",
    "VOICE_FILES",
    "decode_failure",
    "decode_request",
    "decode_texts",
    "encode_failure",
    "encode_request",
    "encode_texts",
]

CONTEXT_FILE: Final = "ovmstrio.json"
"""In a folder that was made of a file of another form: ``{"context_length": 2048}``."""

VOICE_FILES: Final = "*.onnx"
"""Of which a folder has one, if it is a voice of Piper's; beside it is one with ``.json`` behind its name."""

FINISHES: Final = tuple(Finish)
"""Rows have the position of their finish in this."""

LOADED: Final = "loaded"
"""Answers the first message, with facts of the model."""

FAILED: Final = "failed"
"""Answers the first message, with the reason."""

ACCEPTED: Final = "accepted"
"""Answers a request that runs: how many tokens its prompt has, the end of a conversation's prompt, and how many of
these tokens were found in the cache."""

REFUSED: Final = "refused"
"""Answers a request that does not, with an error."""

TOKENS: Final = "tokens"
"""Answers texts, with the tokens of all of them in one array and the numbers of tokens of each."""

CANCELLED: Final = ModelFailure("the request was cancelled")
"""Answers a request that was cancelled before it was answered, so that nothing waits for its answer."""

PART: Final = "part"
"""Answers a request for the next part, with what was understood of a window, or the sound of a sentence."""

_CHAT: Final = "chat"
_TEXT: Final = "text"
_IDS: Final = "ids"


def encode_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Encode texts as one buffer, which a channel copies without reading it.

    A thread may do this for long texts: no call in it takes long.
    """
    return {"text": encode_text("".join(texts)), "lengths": orjson.dumps(list(map(len, texts)))}


def decode_texts(packed: dict[str, Any]) -> list[str]:
    """Return the texts again."""
    text, texts, start = packed["text"].decode(), [], 0
    for length in orjson.loads(packed["lengths"]):
        texts.append(text[start : start + length])
        start += length
    return texts


def encode_request(asked: GenerationRequest) -> dict[str, Any]:
    """Encode a request; its deadline stays where its clock is.

    The texts of the prompt are one buffer, all else is JSON.

    Raises:
        TypeError, ValueError, RecursionError: it holds values that JSON cannot write.
    """
    sampling = {each.name: getattr(asked.sampling, each.name) for each in fields(Sampling)}
    grammar = None if asked.grammar is None else [asked.grammar.kind.value, asked.grammar.text]
    prompt, texts = _encode_prompt(asked.prompt)
    plain = {
        "prompt": prompt,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "stop": list(asked.stop),
        "keeps_stop": asked.keeps_stop,
        "n": asked.n,
        "logprobs": asked.logprobs,
        "echo": asked.echo,
        "grammar": grammar,
        "skips_special_tokens": asked.skips_special_tokens,
    }
    try:
        data = orjson.dumps(plain)
    except orjson.JSONEncodeError:
        # Half of a surrogate pair, or a number of more than 64 bits.
        data = json.dumps(plain).encode()
    return {"n": asked.n, "plain": data, **encode_texts(texts)}


def decode_request(encoded: dict[str, Any]) -> GenerationRequest:
    """Return the request again."""
    plain = json.loads(encoded["plain"])
    grammar, sampling = plain["grammar"], plain["sampling"]
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return GenerationRequest(
        prompt=_decode_prompt(decode_texts(encoded), *plain["prompt"]),
        sampling=Sampling(**sampling),
        stop=tuple(plain["stop"]),
        keeps_stop=plain["keeps_stop"],
        n=plain["n"],
        logprobs=plain["logprobs"],
        echo=plain["echo"],
        grammar=None if grammar is None else Grammar(GrammarKind(grammar[0]), grammar[1]),
        skips_special_tokens=plain["skips_special_tokens"],
        deadline=math.inf,
    )


def _encode_prompt(prompt: Prompt) -> tuple[list[Any], list[str]]:
    """Return the prompt without its texts, and its texts."""
    if isinstance(prompt, str):
        return [_TEXT], [prompt]
    if isinstance(prompt, tuple):
        return [_IDS, prompt], []
    texts = [str(message.get("content") or "") for message in prompt.messages]
    messages = [{**message, "content": ""} for message in prompt.messages]
    tools = [dict(tool) for tool in prompt.tools]
    return [_CHAT, messages, tools, prompt.tool_choice, prompt.tool_name, dict(prompt.template_options)], texts


def _decode_prompt(texts: Sequence[str], kind: str, *parts: Any) -> Prompt:
    if kind == _TEXT:
        return texts[0]
    if kind == _IDS:
        return tuple(parts[0])
    messages, tools, choice, name, options = parts
    for message, text in zip(messages, texts, strict=True):
        message["content"] = text
    return Conversation(tuple(messages), tuple(tools), choice, name, options)


_FAILURES: Final[dict[str, type[ServerError]]] = {
    each.__name__: each
    for each in (ContextExceeded, InvalidField, InvalidRequest, ModelFailure, NotSupported, Overloaded)
}
_DETAILS: Final = ("field", "code", "retry_after_seconds")


def encode_failure(error: ServerError) -> list[Any]:
    """Make plain data of an error; one of another class becomes a failure of the model."""
    name = type(error).__name__
    details = {each: getattr(error, each) for each in _DETAILS if hasattr(error, each)}
    return [name, error.message, details] if name in _FAILURES else [ModelFailure.__name__, error.message, {}]


def decode_failure(plain: list[Any]) -> ServerError:
    """Make the error again."""
    name, message, details = plain
    return _FAILURES[name](message, **details)
