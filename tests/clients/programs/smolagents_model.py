"""The model of smolagents for OpenAI's servers, whole and as events, with a tool that is asked for."""

from __future__ import annotations

from arguments import REST
from smolagents import OpenAIModel, tool


@tool
def weather(tomorrow: bool) -> str:
    """Return the weather.

    Args:
        tomorrow: whether of tomorrow.
    """
    return "rain" if tomorrow else "sun"


model = OpenAIModel(model_id="chat", api_base=f"http://{REST}/v3", api_key="none", max_tokens=150, retry=False)
messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
assert model.generate(messages).token_usage.output_tokens
assert list(model.generate_stream(messages))
assert model.generate(messages, tools_to_call_from=[weather]).tool_calls[0].function.name == "weather"
