"""The Responses API: input as a conversation, and answers as items and events."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.generation import CallDelta, Conversation, Finish, Grammar, GrammarKind, Piece
from tests.service.api.rest.openai.talking import events_of, generator_of
from tests.support.text_generators import CHAT
from tests.unit.api.rest.servers import Serving

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


def _body(given: Any = "one two", **more: Any) -> dict[str, Any]:
    return {"model": CHAT, "input": given, **more}


async def _asked(serving: Serving, **more: Any) -> Any:
    answer = await serving.post(PATH, json={**_body(), **more})
    assert answer.status_code == 200, answer.text
    return generator_of(serving).requests[-1]


async def test_an_answer_is_a_message_among_items(serving: Serving) -> None:
    """With what it was asked with."""
    answer = await serving.post(PATH, json=_body(instructions="be short", max_output_tokens=9, metadata={"a": "b"}))

    document = answer.json()
    assert answer.status_code == 200
    (message,) = document["output"]
    assert message["type"] == "message"
    assert message["content"] == [{"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}]
    assert document["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 4,
    }
    told = ("object", "status", "model", "instructions", "max_output_tokens", "metadata", "error", "store")
    expected = ["response", "completed", CHAT, "be short", 9, {"a": "b"}, None, False]
    assert [document[name] for name in told] == expected


async def test_input_items_become_messages(serving: Serving) -> None:
    """Calls belong to the assistant, and what it thought is not said again."""
    asked = await _asked(
        serving,
        instructions="be short",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for name in ("c1", "c2")
    ]
    function = {"name": "weather", "parameters": TOOL["parameters"], "strict": True}
    assert asked.prompt == Conversation(
        (
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "assistant", "content": "ok"},
        ),
        ({"type": "function", "function": function},),
        "function",
        "weather",
        {"enable_thinking": True, "reasoning_effort": "low"},
    )
    assert asked.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


async def test_a_stream_tells_all_there_is_to_tell_in_order(serving: Serving) -> None:
    """Reasoning, a message and a call, each from its begin to its end, and all numbered."""
    generator_of(serving).script = lambda _: [
        Piece(reasoning="hm", tokens=3, reasoning_tokens=2),
        Piece(text="so"),
        Piece(text="me"),
        Piece(calls=(CallDelta(0, "call_1", "weather", "{"),)),
        Piece(calls=(CallDelta(0, arguments="}"),)),
        Piece(finish=Finish.TOOL_CALLS),
    ]
    answer = await serving.post(PATH, json=_body(stream=True))

    *events, end = events_of(answer.text)
    assert end == "[DONE]"
    assert [each["type"].removeprefix("response.") for each in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert answer.text.count("event: response.output_text.delta\n") == 2
    thought, said, called = events[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert said["content"][0]["text"] == "some"
    assert (called["call_id"], called["name"], called["arguments"]) == ("call_1", "weather", "{}")
    assert [each["output_index"] for each in events if each["type"].endswith("item.done")] == [0, 1, 2]
    assert {each["response"]["id"] for each in events if "response" in each} == {events[0]["response"]["id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(serving: Serving, stream: bool) -> None:
    """With the reason."""
    generator_of(serving).script = lambda _: [Piece(text="a", finish=Finish.LENGTH)]
    answer = await serving.post(PATH, json=_body(stream=stream))
    document = events_of(answer.text)[-2]["response"] if stream else answer.json()

    assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert document["output"][0]["status"] == "incomplete"


async def test_a_failure_within_a_stream_has_an_event_of_its_own(serving: Serving) -> None:
    """With what there was of the answer."""
    generator_of(serving).script = lambda _: [Piece(text="a"), ModelFailure("the engine ended")]
    *_, failed, end = events_of((await serving.post(PATH, json=_body(stream=True))).text)

    assert (failed["type"], end) == ("response.failed", "[DONE]")
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine ended"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"


async def test_an_answer_of_nothing_is_an_empty_message(serving: Serving) -> None:
    """Clients look for one."""
    generator_of(serving).script = lambda _: [Piece(finish=Finish.STOP)]

    (message,) = (await serving.post(PATH, json=_body())).json()["output"]
    assert message["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"input": None}, "input missing in request", "input"),
        ({"input": 7}, "input is not a string or array", "input"),
        ({"input": []}, "Messages array cannot be empty", "input"),
        ({"input": [{"type": "item_reference"}]}, "Unsupported input item type", "input[0].type"),
        ({"input": [{"content": "x"}]}, "Every message must have 'role' field", "input[0].role"),
        ({"previous_response_id": "resp_1"}, "nothing is stored", "previous_response_id"),
        ({"background": True}, "background is not supported", "background"),
        ({"store": True}, "nothing is stored", "store"),
        ({"max_output_tokens": 0}, "max_output_tokens value should be greater than 0", "max_output_tokens"),
        ({"n": 2}, "n greater than 1 is not supported", "n"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type is none of", "text.format.type"),
    ],
)
async def test_a_field_that_cannot_be_is_named(serving: Serving, more: Any, message: str, param: str) -> None:
    """With the reason."""
    answer = await serving.post(PATH, json={**_body(), **more})

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
