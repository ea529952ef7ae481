"""``/responses``: an answer to a conversation, of items."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.openai.fields import Fields, PromptSize
from ovmstrio.api.openai.passed_over import check_passed_over_of_responses
from ovmstrio.api.openai.response_format import read_response_format
from ovmstrio.api.openai.responses.input_items import read_input
from ovmstrio.api.openai.responses.response_answers import ResponseEvents, WholeResponse
from ovmstrio.api.openai.sampling import read_max_tokens
from ovmstrio.api.openai.text_endpoint import Asked, text_rules
from ovmstrio.api.openai.text_request import make_request
from ovmstrio.api.openai.tools import read_tools
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.generation import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.api.openai.api import Body, OpenAIApi
    from ovmstrio.core.generation import GenerationLimits
    from ovmstrio.wire.http.router import Rule

__all__ = ["Responses", "response_rules"]

_UNSERVED: Final[Mapping[str, str]] = {
    "previous_response_id": "nothing is stored; send the conversation as input",
    "conversation": "nothing is stored; send the conversation as input",
    "background": "the answer is given to who waits for it",
    "prompt": "this server has no templates of prompts; send input",
}
_LOGPROBS: Final = "message.output_text.logprobs"


class Responses:
    """The endpoint."""

    def read(self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float) -> Asked:
        """Read a body: input and instructions, tools, and how tokens are chosen."""
        wrong = Gathered()
        fields = Fields(document, wrong, prompt=PromptSize(limits, "input"))
        max_tokens = read_max_tokens(fields, limits, "max_output_tokens")
        messages = read_input(fields)
        tools = read_tools(fields)
        once = fields.flag("parallel_tool_calls") is False
        options = _read_template_options(fields)
        prompt = Conversation(messages, tools.tools, tools.choice, tools.name, options, calls_once=once)
        request = make_request(
            fields,
            limits,
            prompt,
            max_tokens=max_tokens,
            is_stream=is_stream,
            logprobs=_LOGPROBS in (fields.items("include") or ()),
            deadline=deadline,
        )
        written = fields.within("text")
        grammar = None if written is None else read_response_format(written, "format")
        if request.n > 1:
            fields.refuse("n", "n greater than 1 is not supported for Responses API", got=str(request.n))
        for name, reason in _UNSERVED.items():
            if fields.get(name):
                fields.refuse(name, f"{name} is not supported: {reason}", code="unsupported_parameter")
        check_passed_over_of_responses(fields)
        # It is told again with the answer.
        fields.mapping("text")
        wrong.tell()
        return Asked((replace(request, grammar=grammar or request.grammar),))

    def whole(self, body: Body, asked: Asked) -> WholeResponse:
        """Make what gathers an answer."""
        return WholeResponse(body.model, body.document, asked)

    def streamed(self, body: Body, asked: Asked, write_error: Callable[[Exception], bytes]) -> ResponseEvents:
        """Make what writes events; failures have an event of their own here."""
        del write_error
        return ResponseEvents(body.model, body.document, asked)


def response_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules."""
    return text_rules(api, "/responses", Responses())


def _read_template_options(fields: Fields) -> Mapping[str, Any]:
    """Read variables of the template; any effort to reason has the model think, but none."""
    options = fields.mapping("chat_template_kwargs", "chat_template_kwargs must be an object", is_prompt=True) or {}
    reasoning = fields.within("reasoning")
    if reasoning is None:
        return options
    fields.mapping("reasoning")
    effort = reasoning.name_text("effort")
    if effort is None:
        return options
    return {"enable_thinking": effort != "none", "reasoning_effort": effort, **options}
