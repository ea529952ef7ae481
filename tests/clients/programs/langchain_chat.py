"""LangChain's chat models, embeddings and structured output over OpenAI's API, and over its Responses API."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
from arguments import REST
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

SERVER = {"base_url": f"http://{REST}/v3", "api_key": "none", "max_retries": 0}


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Berlin"]
    size: int = Field(ge=0, le=99)
    note: Literal["a", "b"] | None = None


@tool
def weather(city: Literal["Paris", "Berlin"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def run_chat_loop(chat: ChatOpenAI) -> None:
    assert chat.invoke("hello").usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream("hello"))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    for choice in ("required", "any", "weather"):
        called = chat.bind_tools([weather], tool_choice=choice).invoke("How is Paris?")
        assert called.tool_calls[0]["args"]["city"] in {"Paris", "Berlin"}
    whole, *rest = chat.bind_tools([weather], tool_choice="required", strict=True).stream("How is Paris?")
    for chunk in rest:
        whole += chunk
    assert whole.tool_calls[0]["name"] == "weather"
    tool_reply = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
    assert chat.invoke(
        [SystemMessage("Be brief."), HumanMessage("How is Paris?"), called, tool_reply]
    ).response_metadata
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("a city"), City)


options = {**SERVER, "model": "chat", "temperature": 0, "max_tokens": 150}
run_chat_loop(ChatOpenAI(**options, stream_usage=True))
run_chat_loop(ChatOpenAI(**options, use_responses_api=True))
assert len(asyncio.run(ChatOpenAI(**options).abatch(["a", "b"]))) == 2
assert ChatOpenAI(**options, logprobs=True).invoke("hello").response_metadata["logprobs"]["content"]
assert OpenAI(**options).invoke("hello")
embeddings = OpenAIEmbeddings(**SERVER, model="words", check_embedding_ctx_length=False)
first, second = embeddings.embed_documents(["a cat", "a dog"])
assert len(first) == len(second) == len(embeddings.embed_query("a cat"))
try:
    ChatOpenAI(**{**options, "model": "nothing"}).invoke("hello")
except openai.NotFoundError as missing:
    error = missing
assert error.code == "model_not_found"
