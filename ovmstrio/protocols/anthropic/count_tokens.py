"""Anthropic endpoint ``/messages/count_tokens``: number of prompt tokens of a message request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ErrorList, NotSupported
from ovmstrio.core.generation import PromptTokenizer, Task
from ovmstrio.protocols.anthropic.messages import MESSAGES, read_conversation
from ovmstrio.protocols.openai.fields import Fields
from ovmstrio.protocols.openai.text_endpoint import parse_off_loop
from ovmstrio.transport.http.responses import json_response
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.generation import Conversation, GenerationLimits
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

COUNT_TOKENS: Final = MESSAGES


def count_tokens_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def count(request: HttpRequest) -> HttpAnswer:
        body = await api.body(request, COUNT_TOKENS)
        with await api.call(request, body.model, Task.TEXT_GENERATION) as call:
            service = call.service
            if not isinstance(service, PromptTokenizer):
                raise NotSupported(f'the service "{cut(body.model, 80)}" has no tokenizer')
            conversation = await parse_off_loop(partial(_read, body.document, service.limits), body)
            count = len(await service.tokenize_conversation(conversation))
            answer = json_response({"input_tokens": count})
            call.event.sent = len(answer.content)
        return answer

    return api.rules("/messages/count_tokens", "POST", count)


def _read(document: Mapping[str, Any], limits: GenerationLimits) -> Conversation:
    errors = ErrorList()
    fields = Fields(document, errors)
    conversation = read_conversation(fields, limits)
    COUNT_TOKENS.check(fields)
    errors.raise_if_any()
    return conversation
