"""Ollama's endpoint ``/api/generate``: the answer to one text, or its continuation."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.core.generation import Conversation
from ovmstrio.protocols.ollama.api import OllamaEndpoint, image_parts, images_of, read_thinking
from ovmstrio.protocols.ollama.chat import IGNORED
from ovmstrio.protocols.openai.fields import Fields, PromptSize, read_chat_message
from ovmstrio.protocols.openai.known_fields import KnownFields, Refused

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


GENERATE_ENDPOINT: Final = OllamaEndpoint(GENERATE, "prompt", "", _read_prompt, _content)
