"""The text of a conversation, by the library's own reading of the model's template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.openvino.engine.library_errors import reason_of

if TYPE_CHECKING:
    from ovmstrio.core.generation import Conversation

__all__ = ["render_with_library"]


def render_with_library(tokenizer: Any, conversation: Conversation) -> str:
    """Give the prompt of a conversation.

    Raises:
        InvalidRequest: the template does not take it, or there is none.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest("the model has no chat template; send a prompt to /completions")
    options = dict(conversation.template_options)
    wants_answer = bool(options.pop("add_generation_prompt", True))
    tools = [dict(tool) for tool in conversation.tools] if conversation.tool_choice != "none" else []
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in conversation.messages],
            wants_answer,
            tools=tools or None,
            extra_context=options or None,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the chat template does not take the messages: {reason_of(error)}") from error
    return text
