"""Anthropic's client: messages, events, tools, structured output, thinking, token counts, classes of errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from arguments import REST

ASKED: dict[str, Any] = {
    "model": "chat",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Describe Paris."}],
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # this client has no arguments for sampling
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Berlin"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "city", "description": "Store a city.", "input_schema": CITY}]


def check_city(city: Any) -> None:
    assert city["name"] in {"Paris", "Berlin"}, city
    assert 0 <= city["size"] <= 99, city


def check_texts(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, **GREEDY)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12
    with client.messages.stream(**ASKED, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
    )
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    counted = client.messages.count_tokens(model="chat", messages=ASKED["messages"]).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stop = text[3:5]
    stopped = client.messages.create(**ASKED, **GREEDY, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    prefilled = [*ASKED["messages"], {"role": "assistant", "content": "Paris is"}]
    assert client.messages.create(**{**ASKED, "messages": prefilled}).content[0].text
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    assert client.messages.create(**ASKED, system=blocks, thinking=thinking, metadata={"user_id": "a"}).content


def check_tools(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 150, "tools": TOOLS}
    for choice in ({"type": "any"}, {"type": "tool", "name": "city", "disable_parallel_tool_use": True}):
        called = client.messages.create(**asked, tool_choice=choice)
        (block,) = called.content
        assert (called.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "city")
        check_city(block.input)
        with client.messages.stream(**asked, tool_choice=choice) as stream:
            (streamed,) = stream.get_final_message().content
        check_city(streamed.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "stored"}]}
        messages = [
            *ASKED["messages"],
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And Berlin?"}]},
        ]
        assert client.messages.create(**{**asked, "messages": messages, "max_tokens": 5}).content
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    shaped = client.messages.create(**{**ASKED, "max_tokens": 150}, output_config=form)
    check_city(json.loads(shaped.content[0].text))


def refusal(client: anthropic.Anthropic, fields: dict[str, Any]) -> anthropic.APIStatusError:
    try:
        client.messages.create(**fields)
    except anthropic.APIStatusError as error:
        return error
    raise AssertionError(f"{fields} is not refused")


def check_errors(client: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    wrong: tuple[tuple[type[anthropic.APIStatusError], str, dict[str, Any]], ...] = (
        (anthropic.NotFoundError, "not_found_error", {"model": "nothing"}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": 3}}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": "a " * 9_000}]}),
    )
    for kind, name, fields in wrong:
        for stream in (False, True):
            error = refusal(client, {**ASKED, "stream": stream, **fields})
            assert isinstance(error, kind), error
            assert error.body["error"]["type"] == name, error.body
    with client.messages.stream(**{**ASKED, "max_tokens": 1500}) as stream:
        next(iter(stream))


with anthropic.Anthropic(base_url=f"http://{REST}", api_key="none", max_retries=0) as connected:
    check_texts(connected)
    check_tools(connected)
    check_errors(connected)
    assert "chat" in [model.id for model in connected.models.list()]
