"""The text of a conversation: by the model's template in the sandbox, or by the library's own reading of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Conversation
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.openvino.engine.template_process import TemplateProcess
from ovmstrio.openvino.engine.templates import TemplateFailure, read_template_source

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PromptRenderer", "choose_renderer"]

_LIBRARY: Final = "MINJA"
_FIELD: Final = "messages"
_ANSWERS: Final = "add_generation_prompt"


class PromptRenderer(NamedTuple):
    """Makes prompts of conversations.

    Attributes:
        render: renders at once, or refuses.
        source: the template, by which parsers of answers are found.
        process: renders as well, while other requests go on; None for what takes next to no time.
    """

    render: Callable[[Conversation], str]
    source: str
    process: TemplateProcess | None = None


def choose_renderer(tokenizer: Any, folder: Path, mode: str) -> PromptRenderer:
    """Return what makes prompts of conversations; a template that cannot be read refuses each of them.

    Args:
        tokenizer: the library's.
        folder: the model's.
        mode: ``MINJA`` for the library's own reading.
    """
    if mode == _LIBRARY:
        return PromptRenderer(partial(_render_with_library, tokenizer), tokenizer.chat_template)
    try:
        template = read_template_source(
            folder, tokenizer.chat_template, bos_token=tokenizer.get_bos_token(), eos_token=tokenizer.get_eos_token()
        )
    except (TemplateFailure, OSError) as error:
        return PromptRenderer(partial(_refuse, f"the chat template of the model cannot be used: {error}"), "")
    if template is None:
        return PromptRenderer(partial(_refuse, "the model has no chat template; send a prompt to /completions"), "")
    source = template.arguments["tool_source"] or template.arguments["source"]
    process = TemplateProcess(template.arguments, f"the chat template {template.file}".rstrip())
    return PromptRenderer(process.render, source, process)


def _refuse(why: str, _: Conversation) -> str:
    raise InvalidField(why, field=_FIELD)


def _render_with_library(tokenizer: Any, conversation: Conversation) -> str:
    if not tokenizer.chat_template:
        return _refuse("the model has no chat template; send a prompt to /completions", conversation)
    options = dict(conversation.template_options)
    wants_answer = bool(options.pop(_ANSWERS, True))
    tools = [dict(tool) for tool in conversation.tools] if conversation.tool_choice != "none" else []
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in conversation.messages],
            wants_answer,
            tools=tools or None,
            extra_context=options or None,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"the chat template does not take the messages: {reason_of(error)}"
        raise InvalidField(message, field=_FIELD) from error
    return text
