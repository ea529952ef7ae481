"""Anthropic's Messages API over scripted services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.core.errors import ContextExceeded, ModelFailure, Overloaded
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Sampling,
    TokenIds,
    ToolCallDelta,
)
from tests.service.protocols.openai.servers import CHAT, PREFIXES, serve_openai, service_of
from tests.support.callers import gate_of
from tests.unit.protocols.servers import Serving

MESSAGES: Final = "/v1/messages"
BODY: Final[dict[str, Any]] = {"model": CHAT, "max_tokens": 9, "messages": [{"role": "user", "content": "one two"}]}
CITY: Final = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOL: Final = {"name": "city", "description": "a city", "input_schema": CITY}
USAGE: Final = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 1,
    "output_tokens": 2,
    "output_tokens_details": {"thinking_tokens": 0},
}


async def _post(serving: Serving, **more: Any) -> Any:
    answer = await serving.post(MESSAGES, json=BODY | more)
    assert answer.status_code == 200, answer.text
    return answer


async def _request(serving: Serving, **more: Any) -> GenerationRequest:
    await _post(serving, **more)
    request: GenerationRequest = service_of(serving).requests[-1]
    return request


async def _conversation(serving: Serving, **more: Any) -> Conversation:
    prompt = (await _request(serving, **more)).prompt
    assert isinstance(prompt, Conversation)
    return prompt


async def _events(serving: Serving, **more: Any) -> list[dict[str, Any]]:
    found = []
    for block in (await _post(serving, stream=True, **more)).text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _script(serving: Serving, *pieces: GenerationChunk | Exception) -> None:
    service_of(serving).script = lambda _: pieces


def _user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# Answers


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_message_is_answered_with_one_document(serving: Serving, prefix: str) -> None:
    document = (await serving.post(f"{prefix}/messages", json=BODY)).json()
    assert document.pop("id").startswith("msg_")
    assert document == {
        "type": "message",
        "role": "assistant",
        "model": CHAT,
        "content": [_text("one two")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }


async def test_a_stream_has_the_events_of_the_api(serving: Serving) -> None:
    start, *events = await _events(serving)
    assert start["message"].pop("id").startswith("msg_")
    head = {"type": "message", "role": "assistant", "model": CHAT, "content": []}
    assert start == {
        "type": "message_start",
        "message": {**head, "stop_reason": None, "stop_sequence": None, "usage": USAGE | {"output_tokens": 0}},
    }
    assert events == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": _text("")},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            for text in ("one", " two")
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": USAGE,
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (GenerationChunk(tokens=9, finish=Finish.LENGTH), "max_tokens", None),
        (GenerationChunk(tokens=3, finish=Finish.LENGTH), "model_context_window_exceeded", None),
        (GenerationChunk(finish=Finish.STOP, stop="END"), "stop_sequence", "END"),
        (GenerationChunk(finish=Finish.STOP), "end_turn", None),
    ],
)
async def test_the_stop_reason_tells_why_the_answer_ended(
    serving: Serving, last: GenerationChunk, reason: str, sequence: str | None
) -> None:
    _script(serving, last)
    document = (await _post(serving)).json()
    assert (document["stop_reason"], document["stop_sequence"], document["content"]) == (reason, sequence, [])
    delta = (await _events(serving))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


CALLS: Final = (
    GenerationChunk(text="I call"),
    GenerationChunk(calls=(ToolCallDelta(0, "call_1", "city", ""),)),
    GenerationChunk(calls=(ToolCallDelta(0, arguments='{"name": '),)),
    GenerationChunk(calls=(ToolCallDelta(0, arguments='"Paris"}'), ToolCallDelta(1, "call_2", "city", "{}"))),
    GenerationChunk(finish=Finish.TOOL_CALLS),
)


async def test_tool_calls_are_blocks_with_parsed_input(serving: Serving) -> None:
    _script(serving, *CALLS)
    document = (await _post(serving, tools=[TOOL])).json()
    assert document["stop_reason"] == "tool_use"
    assert document["content"] == [
        _text("I call"),
        {"type": "tool_use", "id": "call_1", "name": "city", "input": {"name": "Paris"}},
        {"type": "tool_use", "id": "call_2", "name": "city", "input": {}},
    ]


async def test_streamed_tool_calls_grow_by_parts_of_json(serving: Serving) -> None:
    _script(serving, *CALLS)
    events = await _events(serving, tools=[TOOL])
    begun = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert begun[1:] == [{"type": "tool_use", "id": name, "name": "city", "input": {}} for name in ("call_1", "call_2")]
    parts = [(each["index"], each["delta"]["partial_json"]) for each in events if "partial_json" in str(each)]
    assert parts == [(1, '{"name": '), (1, '"Paris"}'), (2, "{}")]
    ended = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert ended == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_was_cut_off_has_no_input(serving: Serving) -> None:
    call = ToolCallDelta(0, "call_1", "city", '{"name": ')
    _script(serving, GenerationChunk(calls=(call,)), GenerationChunk(tokens=9, finish=Finish.LENGTH))
    document = (await _post(serving, tools=[TOOL])).json()
    assert (document["stop_reason"], document["content"][0]["input"]) == ("max_tokens", {})


REASONED: Final = (
    GenerationChunk(reasoning="I think"),
    GenerationChunk(reasoning=" so."),
    GenerationChunk(text="Yes."),
    GenerationChunk(finish=Finish.STOP),
)


@pytest.mark.parametrize(
    ("thinking", "shown", "is_enabled"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, ["I think so."], True),
        ({"type": "adaptive"}, ["I think so."], True),
        ({"type": "adaptive", "display": "omitted"}, [""], True),
        ({"type": "disabled"}, [], False),
        (None, [], False),
    ],
)
async def test_reasoning_is_a_block_if_it_is_enabled(
    serving: Serving, thinking: Any, shown: list[str], is_enabled: bool
) -> None:
    _script(serving, *REASONED)
    *blocks, text = (await _post(serving, thinking=thinking)).json()["content"]
    assert text == _text("Yes.")
    assert [(block["type"], block["thinking"]) for block in blocks] == [("thinking", each) for each in shown]
    assert all(block["signature"] for block in blocks)
    events = await _events(serving, thinking=thinking)
    deltas = [each["delta"]["type"] for each in events if each["type"] == "content_block_delta"]
    grown = ["thinking_delta"] * 2 if shown == ["I think so."] else []
    assert deltas == [*grown, *(["signature_delta"] if shown else []), "text_delta"]
    prompt = service_of(serving).requests[-1].prompt
    assert prompt.template_options["enable_thinking"] is is_enabled


# Requests


async def test_all_fields_reach_the_model(serving: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    request = await _request(
        serving,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["a", "b"],
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}},
    )
    assert request.sampling == Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7)
    assert request.stop == ("a", "b")
    assert request.grammar is not None
    assert (request.grammar.kind, json.loads(request.grammar.text)) == (GrammarKind.JSON_SCHEMA, schema)
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.template_options == {"enable_thinking": False, "reasoning_effort": "high"}
    form = {"type": "json_schema", "schema": schema}
    assert (await _request(serving, output_format=form)).grammar == Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":"))
    )


async def test_a_conversation_is_one_of_chat(serving: Serving) -> None:
    image_free = [
        _user(_text("How is"), _text("Paris?")),
        {"role": "user", "content": "And Berlin?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                _text("Let me see."),
                {"type": "tool_use", "id": "t1", "name": "city", "input": {"name": "Paris"}},
                {"type": "tool_use", "id": "t2", "name": "city", "input": {}},
            ],
        },
        _user(
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [_text("cold"), _text("wet")], "is_error": True},
            _text("So?"),
        ),
    ]
    system = [
        _text("x-anthropic-billing-header: cc_version=1"),
        {**_text("Be brief."), "cache_control": {"type": "ephemeral"}},
    ]
    prompt = await _conversation(serving, system=system, messages=image_free, tools=[TOOL])
    calls = [("t1", '{"name":"Paris"}'), ("t2", "{}")]
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is\nParis?\nAnd Berlin?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "reasoning": "I look.",
            "tool_calls": [
                {"id": number, "type": "function", "function": {"name": "city", "arguments": text}}
                for number, text in calls
            ],
        },
        {"role": "tool", "content": "sunny", "name": "city", "tool_call_id": "t1"},
        {"role": "tool", "content": "cold\nwet", "name": "city", "tool_call_id": "t2"},
        {"role": "user", "content": "So?"},
    )
    function = {"name": "city", "description": "a city", "parameters": CITY}
    assert prompt.tools == ({"type": "function", "function": function},)
    assert not prompt.continues_final_message


async def test_a_later_system_message_is_text_of_the_user(serving: Serving) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    prompt = await _conversation(serving, messages=messages, system="first")
    assert prompt.messages == ({"role": "system", "content": "first"}, {"role": "user", "content": "a\nb"})


async def test_the_answer_continues_a_last_message_of_the_assistant(serving: Serving) -> None:
    prompt = await _conversation(serving, messages=[*BODY["messages"], {"role": "assistant", "content": "It is"}])
    assert prompt.continues_final_message
    assert prompt.template_options["add_generation_prompt"] is False
    assert prompt.messages[-1] == {"role": "assistant", "content": "It is"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", "")),
        ({"type": "any"}, ("required", "")),
        ({"type": "tool", "name": "city"}, ("function", "city")),
        ({"type": "none"}, ("none", "")),
        (None, ("auto", "")),
    ],
)
async def test_tool_choices_are_those_of_chat(serving: Serving, choice: Any, expected: tuple[str, str]) -> None:
    prompt = await _conversation(serving, tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.tool_name) == expected
    assert not prompt.returns_first_call_only
    if choice is not None:
        prompt = await _conversation(serving, tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert prompt.returns_first_call_only


async def test_a_deferred_tool_is_in_the_prompt_once_a_result_refers_to_it(serving: Serving) -> None:
    tools = [TOOL, {**TOOL, "name": "later", "defer_loading": True}]
    prompt = await _conversation(serving, tools=tools)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["city"]
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    prompt = await _conversation(serving, tools=tools, messages=[*BODY["messages"], _user(found)])
    assert [tool["function"]["name"] for tool in prompt.tools] == ["city", "later"]
    assert "later" in prompt.messages[-1]["content"]


async def test_errors_of_schemas_name_the_tool_of_the_body(serving: Serving) -> None:
    prompt = await _conversation(serving, tools=[{**TOOL, "name": "later", "defer_loading": True}, TOOL])
    assert prompt.parameters_fields == ("tools[1].input_schema",)


async def test_a_text_document_is_text(serving: Serving) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "long"}
    prompt = await _conversation(serving, messages=[_user({"type": "document", "title": "T", "source": source})])
    assert prompt.messages[-1]["content"] == "T\nlong"


# Errors


def _wrong(**more: Any) -> dict[str, Any]:
    return BODY | more


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_wrong(max_tokens=None), "max_tokens is missing"),
        (_wrong(messages=[]), "expected at least one message"),
        (_wrong(messages=[{"role": "tool", "content": "a"}]), "role should be one of user, assistant, system"),
        (_wrong(messages=[{"role": "user"}]), "messages[0].content is missing"),
        (_wrong(messages=[_user({"type": "video"})]), "messages[0].content[0].type: blocks of this type"),
        (_wrong(messages=[_user({"type": "text"})]), "content text missing"),
        (_wrong(messages=[_user({"type": "image", "source": {"type": "file"}})]), "messages[0].content[0].source"),
        (_wrong(tools=[{"name": "a"}]), "tools[0].input_schema is missing"),
        (_wrong(tools=[{"name": "a", "type": "web_search_20250305"}]), "the server has no tools of its own"),
        (_wrong(tool_choice={"type": "any"}), "tool_choice is only allowed when tools are specified"),
        (_wrong(thinking={"type": "deep"}), "type should be one of enabled"),
        (_wrong(stop_sequences=[5]), "stop_sequences array contains non string element"),
        (_wrong(temperature="x"), "temperature is not a valid number"),
        (_wrong(mcp_servers=[{"url": "x"}]), "mcp_servers is not supported: the server calls no tools"),
        (_wrong(max_token=5), "Unknown parameter: 'max_token'; did you mean 'max_tokens'?"),
        (
            _wrong(messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]),
            "the last message uses tools",
        ),
    ],
)
async def test_an_invalid_body_is_refused_with_the_field(serving: Serving, body: Any, expected: str) -> None:
    answer = await serving.post(MESSAGES, json=body)
    document = answer.json()
    assert (answer.status_code, document["type"], document["error"]["type"]) == (400, "error", "invalid_request_error")
    assert expected in document["error"]["message"]
    assert document["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert not service_of(serving).requests


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full"), 429, "rate_limit_error"),
        (ModelFailure("lost"), 500, "api_error"),
        (ContextExceeded("5 tokens", field="prompt"), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_has_its_status(
    serving: Serving, error: Exception, status: int, kind: str, stream: bool
) -> None:
    service_of(serving).refusal = error
    answer = await serving.post(MESSAGES, json=BODY | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 429)
    if isinstance(error, ContextExceeded):
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")


async def test_an_unknown_model_is_not_found(serving: Serving) -> None:
    answer = await serving.post(MESSAGES, json=BODY | {"model": "nothing"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "`nothing` does not exist; available: " in answer.json()["error"]["message"]


async def test_a_failure_of_a_started_stream_is_its_last_event(serving: Serving) -> None:
    _script(serving, GenerationChunk(text="a"), ModelFailure("the engine has exited"))
    events = await _events(serving)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "the engine has exited"}


async def test_the_header_of_the_client_authenticates_it(tmp_path: Path) -> None:
    gate = gate_of({"secret": "infer:*"}, guards_everything=False)
    async with serve_openai(tmp_path, front_end={"gate": gate}) as serving:
        refused = await serving.post(MESSAGES, json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        answer = await serving.post(MESSAGES, json=BODY, headers={"x-api-key": "secret"})
        assert answer.status_code == 200


async def test_batches_are_refused_by_name(serving: Serving) -> None:
    answer = await serving.post(f"{MESSAGES}/batches", json={"requests": []})
    assert answer.status_code == 404
    assert "message batches are not served" in answer.json()["error"]["message"]


async def test_tokens_are_counted_without_generating_any(serving: Serving) -> None:
    service = service_of(serving)
    body = {"model": CHAT, "messages": BODY["messages"], "tools": [TOOL], "tool_choice": {"type": "any"}}
    answer = await serving.post(f"{MESSAGES}/count_tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, 'the service "chat" has no tokenizer')
    counted = []

    async def tokenize_conversation(conversation: Conversation) -> TokenIds:
        await trio.lowlevel.checkpoint()
        counted.append(conversation)
        return (1, 2, 3)

    for name in ("tokenize", "detokenize", "token_texts", "tokenize_conversation"):
        setattr(service, name, tokenize_conversation)
    answer = await serving.post(f"{MESSAGES}/count_tokens", json=body)
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 3})
    (conversation,) = counted
    assert conversation.messages == tuple(BODY["messages"])
    assert [tool["function"]["name"] for tool in conversation.tools] == ["city"]
    assert not service.requests
