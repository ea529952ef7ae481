"""Ollama's endpoint ``/api/generate``: the answer to one text, or its continuation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import Conversation
from ovmstrio.protocols.ollama.api import (
    OllamaAnswer,
    answer_loading,
    image_parts,
    images_of,
    read_body,
    read_request,
    read_thinking,
)
from ovmstrio.protocols.ollama.chat import IGNORED
from ovmstrio.protocols.openai.fields import Fields, PromptSize, read_chat_message
from ovmstrio.protocols.openai.known_fields import KnownFields, Refused
from ovmstrio.protocols.openai.text_endpoint import ParsedRequest, answer_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.generation import GenerationLimits
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.transport.http.router import Rule

_NO_IMAGES: Final = Refused("the model generates text")
GENERATE: Final = KnownFields(
    frozenset(
        {
            *("model", "prompt", "system", "raw", "images", "format", "options", "stream", "think"),
            *("logprobs", "top_logprobs"),
        }
    ),
    IGNORED,
    {
        **dict.fromkeys(("width", "height", "steps"), _NO_IMAGES),
        "context": Refused("send the conversation to /api/chat"),
        "suffix": Refused("the model only appends text"),
        "template": Refused("the server uses the model's template; send a raw prompt"),
    },
)


def generate_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""
    endpoint = OllamaGenerate()

    async def generate(request: HttpRequest) -> HttpAnswer:
        body = await read_body(api, request, GENERATE)
        if body.document.get("prompt") in (None, ""):
            return await answer_loading(api, request, body, GENERATE, {"response": ""})
        return await answer_text(api, endpoint, request, body)

    return api.rules("/generate", "POST", generate, has_tasks=True, prefixes=("/api",))


def _read_prompt(fields: Fields, prompt: PromptSize) -> Conversation | str:
    if fields.flag("raw"):
        for name in ("system", "images"):
            if fields.get(name):
                fields.refuse(name, f"{name} is not supported with raw: write it into the prompt")
        return fields.translated({"prompt": fields.get("prompt")}, prompt).prompt_text("prompt") or ""
    system, text = fields.text("system"), fields.text("prompt")
    images = image_parts(fields)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": [*images, {"type": "text", "text": text or ""}] if images else text})
    read = tuple(read_chat_message(fields.translated(message, prompt)) for message in messages)
    return Conversation(read, template_options=read_thinking(fields), images=images_of(prompt))


def _content(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    del calls
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


class OllamaGenerate:
    """Endpoint."""

    known_fields = GENERATE

    def read(
        self, document: Mapping[str, Any], limits: GenerationLimits, *, is_stream: bool, deadline: float
    ) -> ParsedRequest:
        """Parse a body: a prompt and options."""
        errors = ErrorList()
        fields = Fields(document, errors)
        prompt = _read_prompt(fields, PromptSize(limits, "prompt"))
        request = read_request(fields, limits, prompt, is_stream=is_stream, deadline=deadline)
        GENERATE.check(fields)
        errors.tell()
        return ParsedRequest((request,))

    def whole(self, body: Body, parsed: ParsedRequest) -> OllamaAnswer:
        """Create a builder."""
        return OllamaAnswer(body, parsed, _content)

    def streamed(self, body: Body, parsed: ParsedRequest, write_error: Callable[[Exception], bytes]) -> OllamaAnswer:
        """Create an encoder of lines."""
        return OllamaAnswer(body, parsed, _content, write_error)
