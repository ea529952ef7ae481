"""Ollama's endpoint ``/api/chat``: the next message of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Conversation
from ovmstrio.protocols.ollama.api import (
    OllamaAnswer,
    answer_loading,
    check_keep_alive,
    image_parts,
    images_of,
    read_body,
    read_request,
    read_thinking,
)
from ovmstrio.protocols.openai.fields import Fields, PromptSize, read_chat_message, read_tools
from ovmstrio.protocols.openai.known_fields import KnownFields
from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, answer_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.generation import GenerationLimits
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.transport.http.router import Rule

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


def chat_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""
    endpoint = OllamaChat()

    async def chat(request: HttpRequest) -> HttpAnswer:
        body = await read_body(api, request, CHAT)
        if body.document.get("messages") in (None, []):
            return await answer_loading(api, request, body, CHAT, {"message": {"role": "assistant", "content": ""}})
        return await answer_text(api, endpoint, request, body)

    return api.rules("/chat", "POST", chat, has_tasks=True, prefixes=("/api",))


# Requests


def _read_conversation(fields: Fields, prompt: PromptSize) -> Conversation:
    messages = tuple(
        read_chat_message(message.translated(_chat_message(message), prompt)) for message in fields.objects("messages")
    )
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


# Answers


def _content(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


# Endpoint


class OllamaChat:
    """Endpoint."""

    known_fields = CHAT

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: messages, tools and options."""
        errors = ErrorList()
        fields = Fields(document, errors)
        conversation = _read_conversation(fields, PromptSize(limits, "messages"))
        request = read_request(fields, limits, conversation, is_stream=is_stream, deadline=deadline)
        CHAT.check(fields)
        errors.tell()
        return ParsedRequest((request,))

    def whole(self, body: Body, parsed: ParsedRequest) -> OllamaAnswer:
        """Create a builder."""
        return OllamaAnswer(body, parsed, _content)

    def streamed(self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]) -> OllamaAnswer:
        """Create an encoder of lines."""
        return OllamaAnswer(body, parsed, _content, write_error)
