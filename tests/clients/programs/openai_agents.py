"""OpenAI's agents, over chat completions and over responses: tools, handoffs, forms of output."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from arguments import REST
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

CALLED = []


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Berlin"]
    size: int = Field(ge=0, le=99)


@function_tool
def weather(city: Literal["Paris", "Berlin"]) -> str:
    """Return the weather of a city."""
    CALLED.append(city)
    return "sunny"


def settings(**more: object) -> ModelSettings:
    """Set no limit of tokens: the agents treat a truncated answer as a failure."""
    return ModelSettings(temperature=0, max_tokens=1500, **more)


async def main() -> None:
    set_tracing_disabled(disabled=True)
    client = AsyncOpenAI(base_url=f"http://{REST}/v3", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="chat", openai_client=client)
        other = Agent(name="other", model=model, output_type=City, model_settings=settings())
        described = await Runner.run(other, "Describe Paris.")
        assert isinstance(described.final_output, City)
        streamed = Runner.run_streamed(other, [*described.to_input_list(), {"role": "user", "content": "And Berlin?"}])
        assert [event.type async for event in streamed.stream_events()]
        assert isinstance(streamed.final_output, City)
        must = settings(tool_choice="required", parallel_tool_calls=False)
        asking = Agent(name="asking", model=model, tools=[weather], output_type=City, model_settings=must)
        assert isinstance((await Runner.run(asking, "How is Paris?")).final_output, City)
        handing = Agent(name="handing", model=model, handoffs=[other], model_settings=must)
        assert (await Runner.run(handing, "hello")).last_agent.name == "other"
    assert len(CALLED) >= 2


asyncio.run(main())
