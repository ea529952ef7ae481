"""What other packages' clients send, and every field that OpenAI takes: nothing of it is refused that is not named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.core.generation import Conversation
from ovmstrio.runtimes.generation.grammars import check_grammar, impose_calls
from tests.service.api.rest.openai.talking import chat_body, events_of, generator_of
from tests.support.text_generators import CHAT
from tests.unit.api.rest.servers import Serving

RECORDED: Final = json.loads(Path(__file__).with_name("recorded_bodies.json").read_text())
"""Bodies as the programs in ``tests/clients`` had their clients send them, one of each shape, long texts cut."""

CHATS: Final = "/v3/chat/completions"
COMPLETIONS: Final = "/v3/completions"
RESPONSES: Final = "/v3/responses"


@pytest.mark.parametrize("client", sorted({sent["client"] for sent in RECORDED}))
async def test_what_a_client_sends_is_answered_in_the_form_that_it_asks_for(serving: Serving, client: str) -> None:
    """And its forms and tools can be imposed."""
    for sent in RECORDED:
        if sent["client"] != client:
            continue
        answer = await serving.post(sent["path"], json=sent["body"])

        assert answer.status_code == 200, (sent["body"], answer.text)
        if sent["body"].get("stream"):
            assert events_of(answer.text)[-1] == "[DONE]"
        else:
            assert answer.json()["model"] == CHAT
        asked = generator_of(serving).requests[-1]
        if asked.grammar is not None:
            check_grammar(asked.grammar)
        if isinstance(asked.prompt, Conversation):
            impose_calls(asked.prompt, "hermes3")


_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
_FLAT: Final = {"type": "function", "name": "f", "description": "words", "parameters": {}, "strict": True}
_SAID: Final = {"role": "user", "content": "words"}
_ALIKE: Final = (
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"safety_identifier": "somebody", "prompt_cache_key": "key", "prompt_cache_retention": "24h", "user": "somebody"},
    {"store": False, "parallel_tool_calls": True, "temperature": 1, "top_p": 1},
    {"top_logprobs": 0},
)
_NULLS: Final = dict.fromkeys(
    (
        *("audio", "best_of", "conversation", "echo", "frequency_penalty", "function_call", "functions", "include"),
        *("instructions", "logit_bias", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens"),
        *("max_tool_calls", "metadata", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty"),
        *("previous_response_id", "prompt_cache_key", "reasoning", "reasoning_effort", "response_format"),
        *("safety_identifier", "seed", "service_tier", "stop", "store", "stream", "stream_options", "suffix"),
        *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user", "verbosity"),
        *("web_search_options", "background", "chat_template_kwargs"),
    )
)
_ALLOWED: Final = {"type": "function", "function": {"name": "f"}}
_CHAT_BODIES: Final = (
    *_ALIKE,
    _NULLS,
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"reasoning_effort": "minimal", "verbosity": "low", "modalities": ["text"], "logit_bias": {}},
    {"prediction": {"type": "content", "content": "words"}},
    {"logprobs": True, "top_logprobs": None, "n": 2, "seed": 7, "stop": ["a", "b"]},
    {"max_completion_tokens": 5, "max_tokens": 9},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": None}}},
    {"tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [], "tool_choice": "none"},
    {"messages": [{"role": "developer", "content": "words"}, {**_SAID, "name": "somebody"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    {
        "messages": [
            _SAID,
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "refusal": None, "audio": None},
        ]
    },
    {
        "messages": [
            _SAID,
            {"role": "assistant", "content": "", "tool_calls": [_CALL], "function_call": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "words"}]},
        ]
    },
    {"messages": [_SAID, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, _SAID]},
    {
        "messages": [
            _SAID,
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "function", "name": "f", "content": ""},
        ]
    },
)
_COMPLETION_BODIES: Final = (
    *_ALIKE[:4],
    _NULLS,
    {"logprobs": 0, "echo": False, "n": 1, "best_of": 1},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"suffix": "", "logit_bias": {}},
)
_RESPONSE_BODIES: Final = (
    *_ALIKE,
    _NULLS,
    {"truncation": "auto", "max_tool_calls": 3, "include": ["reasoning.encrypted_content"]},
    {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
    {"tools": [_FLAT], "tool_choice": {"type": "function", "name": "f"}},
    {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "words"}]}, _SAID]},
    {
        "input": [
            _SAID,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "1",
                "name": "f",
                "arguments": "{}",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "words"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "phase": None,
                "content": [{"type": "output_text", "text": "words", "annotations": [], "logprobs": []}],
            },
        ]
    },
)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((CHATS, more) for more in _CHAT_BODIES),
        *((COMPLETIONS, more) for more in _COMPLETION_BODIES),
        *((RESPONSES, more) for more in _RESPONSE_BODIES),
    ],
)
async def test_a_field_of_openais_is_taken(serving: Serving, path: str, more: dict[str, Any]) -> None:
    """Whether it changes the answer or not."""
    usual = {CHATS: chat_body(), COMPLETIONS: {"prompt": "words"}, RESPONSES: {"input": "words"}}[path]
    answer = await serving.post(path, json={"model": CHAT, **usual, **more})

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_choice_among_some_of_the_tools_leaves_no_others(serving: Serving, mode: str, is_chat: bool) -> None:
    """As if they had not been sent."""
    tools = [{"type": "function", "function": {"name": name}} for name in "efg"]
    some = [*tools[:1], *tools[2:]] if is_chat else [{"type": "function", "name": name} for name in "eg"]
    inner = {"mode": mode, "tools": some}
    choice = {"type": "allowed_tools", **({"allowed_tools": inner} if is_chat else inner)}
    usual = chat_body() if is_chat else {"model": CHAT, "input": "words"}

    answer = await serving.post(CHATS if is_chat else RESPONSES, json={**usual, "tools": tools, "tool_choice": choice})

    assert answer.status_code == 200, answer.text
    prompt = generator_of(serving).requests[-1].prompt
    assert isinstance(prompt, Conversation)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["e", "g"]
    assert (prompt.tool_choice, prompt.tool_name) == (mode, "")


@pytest.mark.parametrize(
    ("choice", "message", "param"),
    [
        ({"mode": "must", "tools": [_ALLOWED]}, "should be either 'auto' or 'required'", "tool_choice.mode"),
        ({"mode": "auto", "tools": [_ALLOWED]}, "a function that is not among the tools", "tool_choice"),
        ({"mode": "auto", "tools": 5}, "tool_choice.tools is not an array", "tool_choice.tools"),
        ({"allowed_tools": 7}, "tool_choice.allowed_tools is not an object", "tool_choice.allowed_tools"),
    ],
)
async def test_a_choice_among_tools_that_are_not_there_is_refused(
    serving: Serving, choice: Any, message: str, param: str
) -> None:
    """With the field."""
    tools = [{"type": "function", "function": {"name": "other"}}]
    body = {**chat_body(), "tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}

    answer = await serving.post(CHATS, json=body)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error["param"] == param
