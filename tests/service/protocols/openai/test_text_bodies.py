from __future__ import annotations

import json
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationLimits,
)
from ovmstrio.protocols.openai.api import Body
from ovmstrio.protocols.openai.chat import Chat
from ovmstrio.protocols.openai.completions import Completions
from ovmstrio.protocols.openai.responses import Responses
from ovmstrio.protocols.openai.text_endpoint import TextEndpoint, Usage
from ovmstrio.text.grammars import check_grammar, check_tools, tool_call_grammar
from ovmstrio.util.truncation import MAX_ITEMS, MAX_TOKENIZED_CHARACTERS, max_characters
from tests.service.protocols.openai.servers import CHAT, WORDS, events_of, post_of, service_of
from tests.support.examples import examples
from tests.support.scripted_services import LIMITS
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving

CHATS, COMPLETIONS, RESPONSES = "/v3/chat/completions", "/v3/completions", "/v3/responses"
USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"model": CHAT, "messages": [USER]},
    COMPLETIONS: {"model": CHAT, "prompt": "a"},
    RESPONSES: {"model": CHAT, "input": "a"},
}
ENDPOINTS: dict[str, TextEndpoint] = {CHATS: Chat(), COMPLETIONS: Completions(), RESPONSES: Responses()}
ENDPOINT_LIMITS = GenerationLimits(context_length=1000, max_tokens_limit=500, vocabulary_size=300)


# Accepted bodies


RECORDED: Final = json.loads(Path(__file__).with_name("recorded_bodies.json").read_text())
"""Bodies sent by the clients in ``tests/clients``, one per form, with long texts cut."""


@pytest.mark.parametrize("client", sorted({sent["client"] for sent in RECORDED}))
async def test_bodies_of_clients_are_answered_in_the_requested_form(serving: Serving, client: str) -> None:
    for sent in (each for each in RECORDED if each["client"] == client):
        answer = await serving.post(sent["path"], json=sent["body"])
        assert answer.status_code == 200, (sent["body"], answer.text)
        if sent["body"].get("stream"):
            assert events_of(answer.text)[-1] == "[DONE]"
        else:
            assert answer.json()["model"] == CHAT
        request = service_of(serving).requests[-1]
        if request.grammar is not None:
            check_grammar(request.grammar)
        if isinstance(request.prompt, Conversation):
            check_tools(request.prompt)
            tool_call_grammar(request.prompt, "hermes3")


_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
_COMMON: Final = (
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"safety_identifier": "caller", "prompt_cache_key": "key", "prompt_cache_retention": "24h", "user": "caller"},
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
_CHAT_BODIES: Final = (
    *_COMMON,
    _NULLS,
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"reasoning_effort": "minimal", "verbosity": "low", "modalities": ["text"], "logit_bias": {}},
    {"prediction": {"type": "content", "content": "words"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": None}}},
    {"tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": [], "tool_choice": "none"},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "refusal": None, "audio": None},
            {"role": "assistant", "content": "", "tool_calls": [_CALL], "function_call": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "words"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "function", "name": "f", "content": ""},
        ]
    },
)
_COMPLETION_BODIES: Final = (
    *_COMMON[:4],
    _NULLS,
    {"logprobs": 0, "echo": False, "n": 1, "best_of": 1},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"suffix": "", "logit_bias": {}},
)
_RESPONSE_BODIES: Final = (
    *_COMMON,
    _NULLS,
    {"truncation": "auto", "max_tool_calls": 3, "include": ["reasoning.encrypted_content"]},
    {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}},
    {"reasoning": {"summary": "auto"}},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
    {
        "input": [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "id": "1", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
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
async def test_fields_of_openai_are_accepted(serving: Serving, path: str, more: dict[str, Any]) -> None:
    answer = await serving.post(path, json=BODIES[path] | more)
    assert answer.status_code == 200, answer.text


async def test_instructions_and_the_first_system_messages_are_one(serving: Serving) -> None:
    items = [{"role": role, "content": role} for role in ("developer", "system", "user", "system")]
    for instructions, expected in (("be short", ["be short\n\ndeveloper\n\nsystem"]), (None, ["developer", "system"])):
        answer = await serving.post(RESPONSES, json={"model": CHAT, "input": items, "instructions": instructions})
        assert answer.status_code == 200, answer.text
        messages = service_of(serving).requests[-1].prompt.messages
        assert [each["content"] for each in messages] == [*expected, "user", "system"]
        assert [each["role"] for each in messages][-3:] == ["system", "user", "system"]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
async def test_only_allowed_tools_reach_the_service(serving: Serving, mode: str, path: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "efg"]
    choice: dict[str, Any]
    if path == CHATS:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tools[0], tools[2]]}}
    else:
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in "eg"]}
    answer = await serving.post(path, json=BODIES[path] | {"tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    prompt = service_of(serving).requests[-1].prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["e", "g"]
    assert (prompt.tool_choice, prompt.tool_name) == (mode, "")


async def test_a_thousand_tools_are_accepted(serving: Serving) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
    answer = await serving.post(CHATS, json=BODIES[CHATS] | {"tools": tools})
    assert answer.status_code == 200
    assert len(service_of(serving).requests[-1].prompt.tools) == 1000


async def test_only_large_bodies_are_read_in_a_thread(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    read = Chat.read

    def read_and_record(self: Chat, *args: Any, **options: Any) -> Any:
        threads.append(current_thread() is not main_thread())
        return read(self, *args, **options)

    monkeypatch.setattr(Chat, "read", read_and_record)
    service_of(serving).limits = GenerationLimits()
    for text in ("x", "x" * 2**19):
        answer = await serving.post(
            CHATS, json=BODIES[CHATS] | {"messages": _with_parts({"type": "text", "text": text})}
        )
        assert answer.status_code == 200
    assert threads == [False, True]


# Refused fields


DATA = "data:image/png;base64," + "iVBORw0KGgo" * 20_000
CHAT_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/picture.png"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url"},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/film.mp4"}},
    {"type": "file", "file": {"file_id": "file-1"}},
]
RESPONSE_PARTS: list[dict[str, Any]] = [
    {"type": "input_image", "image_url": DATA},
    {"type": "input_image", "file_id": "file-1"},
    {"type": "input_file", "file_data": DATA},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
]
NO_TEXT = "Unsupported content type; got '{}', and this model accepts text only"


def _with_parts(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


def _allowed(**choice: Any) -> dict[str, Any]:
    return {"tools": [_OTHER], "tool_choice": {"type": "allowed_tools", **choice}}


_OTHER = {"type": "function", "function": {"name": "other"}}
_F = {"type": "function", "function": {"name": "f"}}
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHATS: [
        ({"messages": None}, "Messages missing in request", "messages"),
        ({"messages": "x"}, "Messages are not an array; got 'x'", "messages"),
        ({"messages": []}, "Messages array cannot be empty", "messages"),
        ({"messages": ["x"]}, "Message is not a JSON object; got 'x'", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "Every message must have 'role' field", "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens value should be greater than 0; got 0", "max_tokens"),
        ({"max_tokens": -2}, "max_tokens is not an unsigned integer; got -2", "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens is not an unsigned integer; got '7'", "max_tokens"),
        ({"temperature": 2.1}, "temperature out of range(0.0, 2.0); got 2.1", "temperature"),
        ({"temperature": True}, "temperature is not a valid number; got True", "temperature"),
        ({"top_p": 1.1}, "top_p out of range(0.0, 1.0); got 1.1", "top_p"),
        ({"top_p": 0}, "top_p should be above 0; got 0", "top_p"),
        ({"top_k": 0}, "top_k must be -1 (all tokens) or a positive integer; got 0", "top_k"),
        ({"min_p": 1}, "min_p out of range [0.0, 1.0); got 1", "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty out of range(-2.0, 2.0); got 3", "frequency_penalty"),
        ({"repetition_penalty": "x"}, "repetition_penalty is not a valid number; got 'x'", "repetition_penalty"),
        ({"seed": 2**65}, f"seed out of range [{-(2**63)}, {2**64 - 1}]", "seed"),
        ({"seed": -(2**64)}, f"seed out of range [{-(2**63)}, {2**64 - 1}]", "seed"),
        ({"seed": True}, f"seed out of range [{-(2**63)}, {2**64 - 1}]; got True", "seed"),
        ({"stop": ["x"] * 17}, "stop array must have no more than 16 strings; got 17", "stop"),
        ({"stop": [1]}, "stop array contains non string element", "stop"),
        ({"stop": ""}, "stop array contains an empty string", "stop"),
        ({"n": 3, "best_of": 2}, "n value cannot be greater than best_of; got 3 and 2", "n"),
        ({"best_of": 21}, "best_of exceeds limit provided in graph config: 20; got 21", "best_of"),
        ({"stream_options": {}}, "stream_options provided, but stream not set to true", "stream_options"),
        ({"tool_choice": "x"}, "tool_choice should be either 'none' or 'auto' or 'required'; got 'x'", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice is only allowed when tools are specified", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "Only function tools are supported; got 'web_search'", "tools[0].type"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt cannot both be true",
            "continue_final_message",
        ),
        (
            {"continue_final_message": True, "chat_template_kwargs": {"add_generation_prompt": True}},
            "continue_final_message and add_generation_prompt cannot both be true",
            "continue_final_message",
        ),
        (
            {"continue_final_message": True, "messages": [USER, {"role": "assistant", "tool_calls": [_CALL]}]},
            "continue_final_message is not possible: the final message calls tools",
            "continue_final_message",
        ),
        ({"continue_final_message": 1}, "accepts values true or false", "continue_final_message"),
        ({"add_generation_prompt": "no"}, "accepts values true or false", "add_generation_prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object; got a list", "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "is missing", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "schemas": {}}},
            "Unknown parameter: 'response_format.schemas'",
            "response_format.schemas",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "exact": True}}},
            "Unknown parameter: 'response_format.json_schema.exact'",
            "response_format.json_schema.exact",
        ),
        ({"logit_bias": {"1": 5}}, "logit_bias is not supported", "logit_bias"),
        ({"bad_words": [""]}, "expected texts of 1 to 256 characters", "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words: expected at most 256; got 257", "bad_words"),
        ({"truncate_prompt_tokens": 0}, "should be -1 or at least 1", "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "should be one of left, right", "truncation_side"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "cannot be used in streaming mode", "use_beam_search"),
        ({"documents": [{"text": 1}]}, "documents[0].text is not a string", "documents[0].text"),
        ({"documents": ["a"]}, "documents[0] is not an object", "documents[0]"),
        ({"guided_json": [1]}, "guided_json is not a JSON schema; got a list", "guided_json"),
        ({"guided_regex": ""}, "guided_regex is not a string, or is empty", "guided_regex"),
        ({"guided_choice": []}, "expected a list of texts that are not empty", "guided_choice"),
        ({"guided_choice": ["a", 1]}, "expected a list of texts that are not empty", "guided_choice"),
        ({"structural_tag": "x"}, "structural_tag is not a structural tag in JSON", "structural_tag"),
        ({"structured_outputs": {"regex": 1}}, "is not a string", "structured_outputs.regex"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "not supported", "structured_outputs.whitespace_pattern"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex cannot be combined with response_format",
            "guided_regex",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice cannot be combined with structured_outputs.regex",
            "structured_outputs",
        ),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not supported", "allowed_token_ids"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "parallel_tool_calls"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens value should be at least 1", "num_assistant_tokens"),
        ({"cache_salt": ""}, "cache_salt: expected a string that is not empty", "cache_salt"),
        ({"cache_salt": 7}, "cache_salt is not a string", "cache_salt"),
        ({"max_ngram_size": 101}, "max_ngram_size value can't be greater than 100", "max_ngram_size"),
        (
            {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4},
            "num_assistant_tokens and assistant_confidence_threshold are mutually exclusive",
            "num_assistant_tokens",
        ),
        ({"assistant_confidence_threshold": 0}, "should be above 0", "assistant_confidence_threshold"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is not an integer from 0 to 20", "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": True, "stream": True}, "not supported with stream", "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is not an integer from 0 to 20; got -1", "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "not supported with stream", "prompt_logprobs"),
        ({"store": True}, "store is not supported: only responses of /responses are stored", "store"),
        ({"tools": [_F], "tool_choice": {"type": "x"}}, "is not a valid JSON object", "tool_choice.function"),
        (_allowed(mode="must", tools=[_F]), "should be either 'auto' or 'required'", "tool_choice.mode"),
        (_allowed(mode="auto", tools=[_F]), "a function that is not among the tools", "tool_choice"),
        (_allowed(mode="auto", tools=5), "tool_choice.tools is not an array", "tool_choice.tools"),
        (_allowed(mode=["auto"]), "tool_choice.mode should be either 'auto' or 'required'", "tool_choice.mode"),
        (_allowed(allowed_tools=7), "tool_choice.allowed_tools is not an object", "tool_choice.allowed_tools"),
        *(
            (
                {"messages": _with_parts({"type": "text", "text": "b"}, part), "stream": stream},
                NO_TEXT.format(part["type"]),
                "messages[0].content[1].type",
            )
            for part in CHAT_PARTS
            for stream in (False, True)
        ),
    ],
    COMPLETIONS: [
        ({"prompt": None}, "prompt is missing", "prompt"),
        ({"prompt": ""}, "prompt is missing", "prompt"),
        ({"prompt": 7}, "prompt is not a string", "prompt"),
        ({"prompt": []}, "expected 1 to 1024 prompts; got 0", "prompt"),
        ({"prompt": ["a"] * 1025}, "expected 1 to 1024 prompts; got 1025", "prompt"),
        (
            {"prompt": ["a", ""]},
            "prompt[1] is neither a string nor an array of token ids; got an empty string",
            "prompt[1]",
        ),
        ({"prompt": [1, "a"]}, "expected at least one token id, from 0 to 299", "prompt"),
        ({"prompt": [[300]]}, "expected at least one token id, from 0 to 299", "prompt[0]"),
        ({"prompt": [True]}, "expected at least one token id", "prompt"),
        ({"prompt": [1] * 1001}, "Number of prompt tokens: 1001 exceeds model max length: 1000", "prompt"),
        ({"logprobs": 21}, "logprobs accepts integer values from 0 to 20", "logprobs"),
        ({"logprobs": 2, "stream": True}, "logprobs above 1 is not supported with stream", "logprobs"),
        ({"logprobs": "1"}, "logprobs accepts integer values", "logprobs"),
        ({"max_tokens": 0}, "max_tokens value should be greater than 0", "max_tokens"),
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
        ({"stream": True, "best_of": 2}, "best_of cannot be used in streaming mode", "best_of"),
    ],
    RESPONSES: [
        ({"input": None}, "input missing in request", "input"),
        ({"input": 7}, "input is not a string or array", "input"),
        ({"input": []}, "Messages array cannot be empty", "input"),
        ({"input": [{"type": "item_reference"}]}, "Unsupported input item type", "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "Item with id 'msg_1' not found", "input[0].id"),
        ({"input": [{"type": ["message"]}]}, "Unsupported input item type; got a list", "input[0].type"),
        ({"input": [{"content": "x"}]}, "Every message must have 'role' field", "input[0].role"),
        ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found", "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id is not a string", "previous_response_id"),
        ({"background": True, "store": False}, "background requires store", "background"),
        ({"store": "yes"}, "store accepts values true or false", "store"),
        ({"max_output_tokens": 0}, "max_output_tokens value should be greater than 0", "max_output_tokens"),
        ({"n": 2}, "n greater than 1 is not supported", "n"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type is none of", "text.format.type"),
        ({"max_tool_calls": "two"}, "max_tool_calls", "max_tool_calls"),
        ({"include": ["message.output_text.logprobs", 1]}, "include", "include"),
        ({"truncation": "most"}, "truncation", "truncation"),
        ({"truncation": True}, "truncation", "truncation"),
        ({"top_logprobs": 3}, "top_logprobs requires message.output_text.logprobs in include", "top_logprobs"),
        *(
            (
                {"input": _with_parts({"type": "input_text", "text": "b"}, part)},
                NO_TEXT.format(part["type"]),
                "input[0].content[1].type",
            )
            for part in RESPONSE_PARTS
        ),
    ],
}
FIELDS_WITHOUT_EFFECT: dict[str, list[Any]] = {
    "user": [5, ["x"], {}],
    "safety_identifier": [True],
    "prompt_cache_key": [{}],
    "service_tier": [1.5],
    "verbosity": [["low"]],
    "metadata": ["x", 1, []],
    "prediction": ["x", [1]],
    "stream_options": [1],
}
ALL_PATHS = [({field: each}, field, field) for field, values in FIELDS_WITHOUT_EFFECT.items() for each in values]


@pytest.mark.parametrize(
    ("path", "more", "message", "param"),
    [(path, *row) for path, rows in REFUSED.items() for row in [*rows, *ALL_PATHS]],
)
async def test_bad_fields_are_refused(serving: Serving, path: str, more: Any, message: str, param: str) -> None:
    answer = await serving.post(path, json=BODIES[path] | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    # No large value is sent back.
    assert len(answer.content) < 8192
    assert not service_of(serving).requests


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        (
            {"temperature": 9, "n": 0, "messages": []},
            ["Messages array cannot be empty", "temperature out of range", "n value should be greater than 0"],
        ),
        (
            {"messages": _with_parts({"text": "What?"}, {"type": "hologram"}, 5, {"type": "text"})},
            [
                "content object type missing",
                "Unsupported content type; got 'hologram', and expected text",
                "content array should contain objects",
                "content text missing",
            ],
        ),
    ],
    ids=["fields", "parts"],
)
async def test_all_errors_are_reported_in_one_message(serving: Serving, more: Any, messages: list[str]) -> None:
    answer = await serving.post(CHATS, json=BODIES[CHATS] | more)
    assert answer.status_code == 400
    assert [each for each in messages if each not in answer.json()["error"]["message"]] == []


# Malformed bodies


BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"model": "\xff"}',
    "a list": b"[1]",
    "null": b"null",
    "deep lists": b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a deep tool": b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
    b'"function": {"name": "f", "parameters": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}}]}",
    "a deep variable": b'{"model": "chat", "messages": [{"role": "user", "content": "x"}], '
    b'"chat_template_kwargs": %b1%b}' % (b'{"a":' * 300, b"}" * 300),
    "half a letter": b'{"model": "chat", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "a number without end": b'{"model": "chat", "messages": [], "temperature": 1e999}',
    "a model that is none": b'{"model": "..", "messages": []}',
    "a model of zeros": b'{"model": "\\u0000", "messages": []}',
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("case", BAD_BODIES)
async def test_a_malformed_body_is_the_error_of_the_client(serving: Serving, case: str, path: str) -> None:
    answer = await serving.post(path, content=BAD_BODIES[case])
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


NODE_FAILED = (
    "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
    'Calculator::Process() for node "LLMExecutor" failed: '
)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"{", 412, "The file is not valid json - Cannot parse JSON body"),
        (b"[]", 412, "The file is not valid json - JSON body must be an object"),
        (b'{"prompt": ""}', 412, "The file is not valid json - model field is missing in JSON body"),
        (b'{"model": 1}', 412, "The file is not valid json - model field is not a string"),
        (b'{"model": "chat", "stream": 1}', 412, "The file is not valid json - stream field is not a boolean"),
        (b'{"model": "none"}', 404, "Mediapipe graph definition with requested name is not found"),
        (
            b'{"model": "chat", "prompt": "x", "temperature": 7}',
            400,
            NODE_FAILED + "temperature out of range(0.0, 2.0)",
        ),
    ],
)
async def test_errors_may_have_the_form_of_ovms(ovms_serving: Serving, content: bytes, status: int, text: str) -> None:
    answer = await ovms_serving.post(COMPLETIONS, content=content)
    assert (answer.status_code, answer.json()) == (status, {"error": text})


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
_KEYS = st.sampled_from(
    [
        "type", "text", "role", "content", "function", "name", "arguments", "parameters", "id", "url", "schema",
        "json_schema", "format", "effort", "include_usage", "tool_calls", "call_id", "output", "refusal", "strict",
    ]
) | st.text(max_size=5)  # fmt: skip
_KINDS = st.sampled_from(
    ["text", "function", "json_schema", "json_object", "regex", "grammar", "user", "message", "function_call", "auto"]
)
_VALUES = st.recursive(
    _SCALARS | _KINDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=9,
)
_FIELDS = st.sampled_from(
    [
        "messages", "prompt", "input", "instructions", "stream_options", "max_tokens", "max_completion_tokens", "text",
        "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "repetition_penalty",
        "seed", "stop", "n", "best_of", "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "response_format",
        "chat_template_kwargs", "stop_token_ids", "logit_bias", "reasoning", "include", "metadata", "modalities",
        "ignore_eos", "min_tokens", "suffix", "store", "skip_special_tokens", "reasoning_effort",
    ]
)  # fmt: skip
_BODIES = st.dictionaries(_FIELDS, _VALUES, max_size=8)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=examples(300), deadline=None)
@given(body=_BODIES, is_stream=st.booleans())
def test_any_body_is_read_or_refused(path: str, body: dict[str, Any], is_stream: bool) -> None:
    endpoint = ENDPOINTS[path]
    try:
        text_call = endpoint.read(body, ENDPOINT_LIMITS, is_stream=is_stream, deadline=0)
    except InvalidRequest:
        return
    for request in text_call.requests:
        assert json.dumps(getattr(request.prompt, "messages", request.prompt))
        assert json.dumps(getattr(request.prompt, "tools", ()))
    answer = endpoint.response_builder(Body(body, CHAT), text_call)
    answer.take(0, GenerationChunk(text="x", finish=Finish.STOP))
    assert json.dumps(answer.document(Usage()))


# Bounds of texts and lists


TEXT: Any = object()
"""A placeholder of a text that is too long."""
assert LIMITS.context_length is not None
LONGEST = max_characters(LIMITS.context_length)
CONTEXT = "This model's maximum context length is 1000 tokens, and {} has at least {}"


def _call(**function: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}]}


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


TOO_LONG: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (CHATS, "messages", more)
        for more in (
            {"messages": [{"role": "user", "content": TEXT}]},
            {"messages": _with_parts({"type": "text", "text": TEXT})},
            {"messages": [{**USER, "name": TEXT}]},
            {"messages": [{**USER, "reasoning_content": TEXT}]},
            {"messages": [{**USER, "reasoning": TEXT}]},
            _call(arguments=TEXT),
            _call(arguments={"a": TEXT}),
            _tool(description=TEXT),
            _tool(parameters={"a": TEXT}),
            {"chat_template_kwargs": {"a": TEXT}},
        )
    ),
    (COMPLETIONS, "prompt", {"prompt": TEXT}),
    (COMPLETIONS, "prompt[1]", {"prompt": ["a", TEXT]}),
    (RESPONSES, "input", {"input": TEXT}),
    (RESPONSES, "input", {"instructions": TEXT}),
    (RESPONSES, "input", {"input": [{"role": "user", "content": TEXT}]}),
    (RESPONSES, "input", {"input": [{"type": "function_call_output", "call_id": "a", "output": TEXT}]}),
]


def _filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, text) for each in value]
    return text if value is TEXT else value


async def _error(serving: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await serving.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert [service_of(serving).requests, service_of(serving, WORDS).requests] == [[], []]
    assert len(answer.content) < 8192
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("characters", ["the cat ", "\u4e2d", "\n", "\x01"])
@pytest.mark.parametrize(("path", "field", "more"), TOO_LONG)
async def test_a_prompt_above_the_context_length_is_refused_by_its_characters(
    serving: Serving, path: str, field: str, more: Any, characters: str
) -> None:
    body = {**BODIES[path], **_filled(more, characters * (LONGEST // len(characters) + 1))}
    for stream in (False, True):
        error = await _error(serving, path, {**body, "stream": stream})
        assert error["message"].startswith(CONTEXT.format(field, ""))
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


async def test_texts_of_a_conversation_are_counted_together(serving: Serving) -> None:
    part = "a" * (LONGEST // 100)
    messages = [{"role": "user", "content": part} for _ in range(102)]
    # The last message is not read, as the messages before it are too long together.
    error = await _error(serving, CHATS, {"model": CHAT, "messages": [*messages, 3]})
    assert error["message"].startswith(CONTEXT.format("messages", len(part) * 101))
    answer = await serving.post(CHATS, json={"model": CHAT, "messages": messages[:100]})
    assert answer.status_code == 200


MANY = MAX_ITEMS + 1
MANY_MEMBERS = dict.fromkeys(map(str, range(MANY)), 1)
MEMBERS = "JSON body: expected at most 16384 objects and members of objects, got more"
MOST_BYTES = "text: expected at most 4194304 bytes per request"
UNCHECKED = "the rest of the request was not checked"
EMBEDDINGS, TOKENIZE, RERANK, SPEECH = "/v3/embeddings", "/v3/tokenize", "/v3/rerank", "/v3/audio/speech"
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 2**18]}}}
TOO_MANY: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHATS: [
        ({"messages": [USER] * MANY}, MEMBERS),
        ({"messages": [3] * MAX_ITEMS}, UNCHECKED),
        ({"messages": [3] * 100_001}, "expected at most 16384 objects in all lists"),
        ({"messages": [{}] * 500_001}, "at most 16384 objects and members"),
        ({"messages": _with_parts(*[{}] * 30_001)}, "at most 16384 objects and members"),
        ({"messages": [{"role": "a" * 257, "content": "a"}]}, "Invalid message structure"),
        ({"messages": _with_parts({"type": "a" * 100_000})}, "Unsupported content type; got 'aaaa"),
        ({"tools": [_F] * MANY}, MEMBERS),
        (_tool(name="f" * 257), "tools[0].function.name: expected at most 256 characters; got 257"),
        (
            {"response_format": SCHEMA},
            "response_format.json_schema.schema: expected at most 262144 characters and members",
        ),
        ({"metadata": {"a": ["b"] * 2**18}}, "metadata: expected at most 262144 characters and members"),
        ({"stop": ["a" * 1025]}, "expected at most 1024 characters each"),
        ({"stream": True, "stream_options": MANY_MEMBERS}, MEMBERS),
        ({"model": "a" * 1025}, "model field: expected at most 1024 characters"),
    ],
    COMPLETIONS: [
        ({"stop_token_ids": [1] * MANY}, "stop_token_ids: expected at most 16384 members; got 16385"),
        ({"logit_bias": MANY_MEMBERS}, MEMBERS),
        ({"prompt": [1] * 1001}, "Number of prompt tokens: 1001 exceeds model max length: 1000"),
        ({"prompt": [1] * 1000 + [-1]}, "Number of prompt tokens: 1001 exceeds"),
    ],
    RESPONSES: [({"include": ["a"] * MANY}, "include: expected at most 16384 members")],
    EMBEDDINGS: [
        ({"input": [1] * (2**18 + 1)}, "input: expected at most 262144 tokens"),
        ({"input": [[1] * 1000] * 263}, "input: expected at most 262144 tokens in all; got 263000"),
    ],
    RERANK: [({"query": "a", "documents": [3] * 500}, UNCHECKED)],
    TOKENIZE: [
        ({"text": ["a"] * MANY}, "text: expected at most 16384 texts; got 16385"),
        ({"text": "a" * (MAX_TOKENIZED_CHARACTERS + 1)}, f"{MOST_BYTES}; got 4194305; send several requests"),
        ({"text": ["a" * 2**20] * 4 + ["a"]}, f"{MOST_BYTES}; got 4194305"),
        ({"text": "\u4e2d" * (2**22 // 3 + 1)}, MOST_BYTES),
        (
            {"text": ["a"] * 1025, "max_length": 4096, "pad_to_max_length": True},
            "max_length: expected at most 4194304 tokens per request, including padding; got 4198400",
        ),
    ],
    SPEECH: [
        ({"input": " " * 200_000}, "input: expected at most 4096 characters"),
        ({"input": "a", "voice": "a" * 257}, "voice: expected at most 256 characters"),
    ],
}


@pytest.mark.parametrize(("path", "more", "message"), [(path, *row) for path, rows in TOO_MANY.items() for row in rows])
async def test_lists_objects_and_words_have_bounds(serving: Serving, path: str, more: Any, message: str) -> None:
    error = await _error(serving, path, {**BODIES.get(path, {"model": WORDS}), **more})
    assert message in error["message"]


async def test_requests_at_the_bounds_are_answered(serving: Serving) -> None:
    answer = await serving.post(TOKENIZE, json={"model": WORDS, "text": ["a" * 2**20] * 4})
    assert [len(row) for row in answer.json()["tokens"]] == [2**20] * 4
    assert answer.json()["tokens"][3][-2:] == [97, 97]
    answer = await serving.post(TOKENIZE, json={"model": WORDS, "text": ["b"] * MAX_ITEMS})
    assert answer.json() == {"tokens": [[98]] * MAX_ITEMS}
    answer = await serving.post(EMBEDDINGS, json={"model": WORDS, "input": [[1] * 524] * 500})
    assert answer.json()["usage"]["prompt_tokens"] == 262_000
    text = "a \u4e2d\n\x01" * 40_000
    body = {"model": WORDS, "query": "a", "documents": [text, "b"], "return_documents": True}
    answer = await serving.post(RERANK, json=body)
    assert [each["document"]["text"] for each in answer.json()["results"]] == [text, "b"]


# Clients that disconnect


async def test_a_client_may_disconnect_at_any_byte(serving: Serving) -> None:
    request = post_of(CHATS, {**BODIES[CHATS], "stream": True})
    for size in range(0, len(request), 5):
        async with serving.connect() as peer:
            await peer.send(request[:size])
    async with serving.connect() as peer:
        await peer.send(request)
        text = await peer.until(b"\r\n0\r\n\r\n")
    for size in range(0, len(text), 37):
        async with serving.connect() as peer:
            await peer.send(request)
            with trio.fail_after(WAIT_SECONDS):
                taken = 0
                while taken < size:
                    taken += len(await peer.stream.receive_some(size - taken))
    answer = await serving.post(CHATS, json=BODIES[CHATS])
    assert answer.json()["choices"][0]["message"]["content"] == "a"
    await serving.wait_closed()
    assert service_of(serving).running == 0
