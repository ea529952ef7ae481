"""``/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.openai.chat_answers import ChatEvents, WholeChat
from ovmstrio.api.openai.fields import Fields, PromptSize
from ovmstrio.api.openai.messages import read_messages
from ovmstrio.api.openai.sampling import read_max_tokens
from ovmstrio.api.openai.text_endpoint import Asked, text_rules
from ovmstrio.api.openai.text_request import make_request, read_stream_options
from ovmstrio.api.openai.tools import read_tools
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.api.openai.api import Body, OpenAIApi
    from ovmstrio.core.generation import GenerationLimits
    from ovmstrio.wire.http.router import Rule

__all__ = ["Chat", "chat_rules"]


class Chat:
    """The endpoint."""

    def read(self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float) -> Asked:
        """Read a body: messages, tools, and how tokens are chosen."""
        wrong = Gathered()
        fields = Fields(document, wrong, prompt=PromptSize(limits, "messages"))
        options = read_stream_options(fields, is_stream=is_stream)
        max_tokens = read_max_tokens(fields, limits, "max_tokens", "max_completion_tokens")
        request = make_request(
            fields,
            limits,
            _read_conversation(fields),
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=_read_logprobs(fields),
            deadline=deadline,
        )
        wrong.tell()
        return Asked((request,), options.tells_usage, options.counts_on)

    def whole(self, body: Body, asked: Asked) -> WholeChat:
        """Make what gathers an answer."""
        return WholeChat(body.model, asked.requests[0].n, has_logprobs=asked.requests[0].logprobs)

    def streamed(self, body: Body, asked: Asked, write_error: Callable[[Exception], bytes]) -> ChatEvents:
        """Make what writes events."""
        return ChatEvents(body.model, asked, write_error)


def chat_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules."""
    return text_rules(api, "/chat/completions", Chat())


def _read_conversation(fields: Fields) -> Conversation:
    messages = read_messages(fields)
    tools = read_tools(fields)
    options = fields.mapping("chat_template_kwargs", "chat_template_kwargs must be an object", is_prompt=True) or {}
    effort = fields.name_text("reasoning_effort")
    if effort is not None:
        options = {"reasoning_effort": effort, **options}
    modalities = fields.items("modalities") or ["text"]
    if modalities != ["text"]:
        fields.refuse("modalities", "this model makes text only", code="unsupported_parameter")
    once = fields.flag("parallel_tool_calls") is False
    return Conversation(messages, tools.tools, tools.choice, tools.name, options, calls_once=once)


def _read_logprobs(fields: Fields) -> bool:
    top = fields.unsigned("top_logprobs")
    if top:
        told = "top_logprobs above 0 is not supported: the library tells of the chosen token only; leave it out"
        fields.refuse("top_logprobs", told, got=str(top), code="unsupported_parameter")
    return bool(fields.flag("logprobs"))
