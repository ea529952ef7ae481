"""LiteLLM's calls: chat, events, tools, forms, completions, embeddings, scores and errors."""

from __future__ import annotations

import asyncio
import os

from arguments import REST

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

SERVER = {"api_base": f"http://{REST}/v3", "api_key": "none", "num_retries": 0}
CHAT = {**SERVER, "model": "openai/chat", "max_tokens": 150, "temperature": 0}
MESSAGES = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Berlin"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}

answer = litellm.completion(**CHAT, messages=MESSAGES)
assert answer.usage.completion_tokens
assert answer.id.startswith("chatcmpl-")
chunks = list(litellm.completion(**CHAT, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
assert any(getattr(chunk, "usage", None) for chunk in chunks)
assert litellm.stream_chunk_builder(chunks).choices[0].finish_reason in {"stop", "length"}
assert asyncio.run(litellm.acompletion(**CHAT, messages=MESSAGES)).choices
for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
    called = litellm.completion(**CHAT, messages=MESSAGES, tools=[TOOL], tool_choice=choice).choices[0].message
    assert called.tool_calls[0].function.name == "weather"
history = [*MESSAGES, called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}]
assert litellm.completion(**CHAT, messages=history, tools=[TOOL]).choices
schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS, "strict": True}}
assert "city" in litellm.completion(**CHAT, messages=MESSAGES, response_format=schema).choices[0].message.content
assert litellm.text_completion(**SERVER, model="text-completion-openai/chat", prompt="hello", max_tokens=4).choices
assert len(litellm.embedding(**SERVER, model="openai/words", input=["a cat", "a dog"]).data) == 2
for kind, more in (
    (litellm.NotFoundError, {"model": "openai/nothing", "messages": MESSAGES}),
    (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
):
    try:
        litellm.completion(**{**CHAT, **more})
    except kind:
        continue
    raise AssertionError(kind)
