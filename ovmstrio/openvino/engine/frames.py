"""What a server and its engines say to each other: requests as plain data, and the words of their messages."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Final

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

__all__ = [
    "ACCEPTED",
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
    "encode_failure",
    "encode_request",
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
"""Answers texts, with their tokens."""

PART: Final = "part"
"""Answers a request for the next part, with what was understood of a window, or the sound of a sentence."""

_CHAT: Final = "chat"
_TEXT: Final = "text"
_IDS: Final = "ids"


def encode_request(asked: GenerationRequest) -> dict[str, Any]:
    """Make plain data of a request; its deadline stays where its clock is."""
    sampling = {each.name: getattr(asked.sampling, each.name) for each in fields(Sampling)}
    grammar = None if asked.grammar is None else [asked.grammar.kind.value, asked.grammar.text]
    return {
        "prompt": _encode_prompt(asked.prompt),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "stop": list(asked.stop),
        "keeps_stop": asked.keeps_stop,
        "n": asked.n,
        "logprobs": asked.logprobs,
        "echo": asked.echo,
        "grammar": grammar,
        "skips_special_tokens": asked.skips_special_tokens,
    }


def decode_request(plain: dict[str, Any]) -> GenerationRequest:
    """Make the request again."""
    grammar = plain["grammar"]
    return GenerationRequest(
        prompt=_decode_prompt(*plain["prompt"]),
        sampling=Sampling(**plain["sampling"]),
        stop=tuple(plain["stop"]),
        keeps_stop=plain["keeps_stop"],
        n=plain["n"],
        logprobs=plain["logprobs"],
        echo=plain["echo"],
        grammar=None if grammar is None else Grammar(GrammarKind(grammar[0]), grammar[1]),
        skips_special_tokens=plain["skips_special_tokens"],
        deadline=math.inf,
    )


def _encode_prompt(prompt: Prompt) -> list[Any]:
    if isinstance(prompt, str):
        return [_TEXT, prompt]
    if isinstance(prompt, tuple):
        return [_IDS, list(prompt)]
    messages = [dict(message) for message in prompt.messages]
    tools = [dict(tool) for tool in prompt.tools]
    return [_CHAT, messages, tools, prompt.tool_choice, prompt.tool_name, dict(prompt.template_options)]


def _decode_prompt(kind: str, *parts: Any) -> Prompt:
    if kind == _TEXT:
        return str(parts[0])
    if kind == _IDS:
        return tuple(parts[0])
    messages, tools, choice, name, options = parts
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
