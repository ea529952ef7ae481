"""Ollama's endpoint ``/api/chat``: the next message of a conversation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.generation import Conversation
from ovmstrio.protocols.ollama.api import (
    OllamaEndpoint,
    check_keep_alive,
    image_parts,
    images_of,
    read_thinking,
)
from ovmstrio.protocols.openai.fields import Fields, PromptSize, read_chat_message, read_tools
from ovmstrio.protocols.openai.known_fields import KnownFields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

IGNORED: Final[Mapping[str, Callable[[Fields, str], object]]] = {
    "keep_alive": check_keep_alive,
    # A prompt that is too long is refused in any case.
    **dict.fromkeys(("truncate", "shift"), Fields.flag),
}
CHAT: Final = KnownFields(
    frozenset({"model", "messages", "tools", "format", "options", "stream", "think", "logprobs", "top_logprobs"}),
    IGNORED,
    {},
)


# Requests


def _read_conversation(fields: Fields, prompt: PromptSize) -> Conversation:
    messages = tuple(
        read_chat_message(message.translated(_chat_message(message), prompt)) for message in fields.objects("messages")
    )
    _add_ids(messages)
    tools = read_tools(fields.translated({"tools": fields.get("tools")}, prompt))
    options = read_thinking(fields)
    # The answer continues a last message of the assistant, as in Ollama.
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and not last.get("tool_calls")
    if continues:
        options["add_generation_prompt"] = False
    return Conversation(
        messages,
        tools.tools,
        template_options=options,
        continues_final_message=continues,
        images=images_of(prompt),
    )


def _chat_message(message: Fields) -> dict[str, Any]:
    """Return a message in chat's form."""
    made = {name: message.get(name) for name in ("role", "content", "tool_calls", "tool_call_id")}
    made |= {"name": message.get("tool_name"), "reasoning_content": message.get("thinking")}
    images = image_parts(message)
    if images:
        made["content"] = [*images, {"type": "text", "text": message.get("content") or ""}]
    return made


def _add_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Add ids to calls and results without one: Ollama's clients send none, but some templates need them."""
    count, unanswered = 0, deque[tuple[str, str]]()  # ids and functions
    for message in messages:
        for call in filter(None, message.get("tool_calls", ())):
            count += 1
            # Mistral's templates require nine letters or digits; equal prompts have equal ids for the prefix cache.
            call["id"] = call["id"] or f"call{count:05}"
            unanswered.append((call["id"], call["function"]["name"]))
        if message["role"] == "tool" and unanswered:
            name = message.get("name")
            found = next((call for call in unanswered if call[1] == name), unanswered[0])
            if message.setdefault("tool_call_id", found[0]) == found[0]:
                unanswered.remove(found)


# Answers


def _content(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


CHAT_ENDPOINT: Final = OllamaEndpoint(CHAT, "messages", [], _read_conversation, _content)
