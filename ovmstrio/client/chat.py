"""Values of chats over OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ovmstrio.core.errors import ServerError

ChatMessage = Mapping[str, Any]
"""``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Token counts; ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """Delta of an answer; ``finish`` and ``usage`` come near the end."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""
    finish: str = ""
    usage: ChatUsage | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Complete answer of a chat; ``tool_calls`` are the objects of OpenAI's API, and ``document`` is all of it."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish: str = ""
    usage: ChatUsage | None = None
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read_answer(document: Mapping[str, Any]) -> ChatAnswer:
    """Read a chat completion; raises ``ValueError``, ``LookupError`` or ``TypeError`` if it is none."""
    choice = document["choices"][0]
    message = choice["message"]
    usage = document.get("usage")
    return ChatAnswer(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=tuple(message.get("tool_calls") or ()),
        finish=choice.get("finish_reason") or "",
        usage=None if usage is None else _usage(usage),
        document=document,
    )


def read_delta(document: Mapping[str, Any]) -> ChatDelta:
    """Read an event of a streamed chat.

    Raises:
        ServerError: the event is an error.
        ValueError, LookupError, TypeError, AttributeError: the event is malformed.
    """
    if "error" in document:
        raise ServerError(text_of_error(document["error"]))
    usage = document.get("usage")
    chat_usage = None if usage is None else _usage(usage)
    if not document.get("choices"):
        return ChatDelta(usage=chat_usage)
    choice = document["choices"][0]
    delta = choice.get("delta") or {}
    return ChatDelta(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        calls="".join(_call(each) for each in delta.get("tool_calls") or ()),
        finish=choice.get("finish_reason") or "",
        usage=chat_usage,
    )


def _usage(document: Mapping[str, Any]) -> ChatUsage:
    details = document.get("prompt_tokens_details") or {}
    return ChatUsage(
        int(document["prompt_tokens"]),
        int(document.get("completion_tokens", 0)),
        int(details.get("cached_tokens") or 0),
    )


def _call(document: Mapping[str, Any]) -> str:
    function = document.get("function") or {}
    name = function.get("name")
    return (f"\n{name} " if name else "") + (function.get("arguments") or "")


def text_of_error(error: Any) -> str:
    """Return the text of an error, which is an object in OpenAI's format and a string in OVMS's."""
    return str(error["message"] if isinstance(error, dict) else error)
