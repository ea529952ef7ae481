"""Haystack's generator and embedders for OpenAI's servers."""

from __future__ import annotations

from arguments import REST
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret

SERVER = {"api_base_url": f"http://{REST}/v3", "api_key": Secret.from_token("none"), "max_retries": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Berlin"]}}, "required": ["city"]}

came = []
generator = OpenAIChatGenerator(**SERVER, model="chat", generation_kwargs={"max_tokens": 40, "temperature": 0})
messages = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("hello")]
assert generator.run(messages)["replies"][0].text
assert generator.run(messages, streaming_callback=came.append)["replies"][0].meta["finish_reason"]
assert came
tool = Tool(name="weather", description="Tells it.", parameters=PARAMETERS, function=lambda city: f"sunny in {city}")
called = generator.run(messages, tools=[tool], generation_kwargs={"tool_choice": "required", "max_tokens": 150})
reply = called["replies"][0]
assert reply.tool_calls[0].tool_name == "weather"
tool_reply = ChatMessage.from_tool("sunny", origin=reply.tool_calls[0])
assert generator.run([*messages, reply, tool_reply], tools=[tool])["replies"]
assert OpenAITextEmbedder(**SERVER, model="words").run("a cat")["embedding"]
assert OpenAIDocumentEmbedder(**SERVER, model="words").run([Document(content="a dog")])["documents"][0].embedding
