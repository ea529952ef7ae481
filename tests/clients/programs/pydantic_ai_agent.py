"""Agents of Pydantic AI, over chat completions and over responses: texts, events, tools, typed output."""

from __future__ import annotations

import asyncio
from typing import Literal

from arguments import REST
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Berlin"]
    size: int = Field(ge=0, le=99)


async def main() -> None:
    provider = OpenAIProvider(base_url=f"http://{REST}/v3", api_key="none")
    settings = {"temperature": 0, "max_tokens": 120}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("chat", provider=provider)
        plain = Agent(model, instructions="Be brief.", model_settings=settings)
        first = await plain.run("hello")
        assert first.usage.output_tokens
        assert (await plain.run("and?", message_history=first.all_messages())).output
        async with plain.run_stream("hello") as streamed:
            assert [text async for text in streamed.stream_text(delta=True)]
        for output in (NativeOutput(City), ToolOutput(City)):
            agent = Agent(model, output_type=output, model_settings=settings)
            assert isinstance((await agent.run("Describe Paris.")).output, City)


asyncio.run(main())
