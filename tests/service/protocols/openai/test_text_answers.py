from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.core.errors import ModelFailure, Overloaded
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationLimits,
    Grammar,
    GrammarKind,
    LikelyToken,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
)
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.transport.http.router import Route
from tests.service.protocols.openai.servers import (
    CHAT,
    PREFIXES,
    chat_body,
    events_of,
    post_of,
    serve_openai,
    service_of,
)
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving

CHATS, COMPLETIONS, RESPONSES = "/v3/chat/completions", "/v3/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: chat_body(),
    COMPLETIONS: {"model": CHAT, "prompt": "one two"},
    RESPONSES: {"model": CHAT, "input": "one two"},
}
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 2,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


async def _post(serving: Serving, path: str = CHATS, **more: Any) -> Any:
    answer = await serving.post(path, json=BODIES[path] | more)
    assert answer.status_code == 200, answer.text
    return answer


async def _request(serving: Serving, path: str = CHATS, **more: Any) -> Any:
    await _post(serving, path, **more)
    return service_of(serving).requests[-1]


# Documents


MESSAGE = {"role": "assistant", "content": "one two", "refusal": None}


@pytest.mark.parametrize(
    ("path", "body", "kind", "id_prefix", "answer"),
    [
        *(
            (f"{prefix}/chat/completions", CHATS, "chat.completion", "chatcmpl-", {"message": MESSAGE})
            for prefix in PREFIXES
        ),
        (COMPLETIONS, COMPLETIONS, "text_completion", "cmpl-", {"text": "one two"}),
    ],
)
async def test_a_text_is_answered_with_one_document(
    serving: Serving, path: str, body: str, kind: str, id_prefix: str, answer: dict[str, Any]
) -> None:
    document = (await serving.post(path, json=BODIES[body])).json()
    assert document.pop("id").startswith(id_prefix)
    assert isinstance(document.pop("created"), int)
    choice = {"index": 0, **answer, "logprobs": None, "finish_reason": "stop"}
    assert document == {"object": kind, "model": CHAT, "choices": [choice], "usage": USAGE}


async def test_a_response_is_a_message_among_items(serving: Serving) -> None:
    fields = {"instructions": "be short", "max_output_tokens": 9, "metadata": {"a": "b"}}
    document = (await _post(serving, RESPONSES, **fields)).json()
    (message,) = document["output"]
    assert message["type"] == "message"
    assert message["content"] == [{"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}]
    expected = {"object": "response", "status": "completed", "model": CHAT, "error": None, "store": True, **fields}
    assert document.items() >= expected.items()
    assert document["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 4,
    }


async def test_a_response_without_text_has_an_empty_message(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(finish=Finish.STOP)]
    (message,) = (await _post(serving, RESPONSES)).json()["output"]
    assert message["content"][0]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_response_is_incomplete(serving: Serving, stream: bool) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="a", finish=Finish.LENGTH)]
    answer = await _post(serving, RESPONSES, stream=stream)
    document = events_of(answer.text)[-2]["response"] if stream else answer.json()
    assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert document["output"][0]["status"] == "incomplete"


async def test_choices_of_a_chat_have_indices(serving: Serving) -> None:
    document = (await _post(serving, n=2)).json()
    events = events_of((await _post(serving, n=2, stream=True)).text)[:-1]
    choices = [(each["index"], each["message"]["content"]) for each in document["choices"]]
    assert choices == [(0, "one two"), (1, "one two")]
    assert [each["choices"][0]["index"] for each in events] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert document["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a b", ["a b"]),
        (["a", "b c"], ["a", "b c"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [7]], ["a", (7,)]),
    ],
)
async def test_each_prompt_of_a_completion_is_a_request(serving: Serving, prompt: Any, prompts: list[Any]) -> None:
    choices = (await _post(serving, COMPLETIONS, prompt=prompt, n=2)).json()["choices"]
    requests = service_of(serving).requests
    assert sorted((each.prompt for each in requests), key=str) == sorted(prompts, key=str)
    texts = [each if isinstance(each, str) else " ".join(map(str, each)) for each in prompts]
    assert [(each["index"], each["text"]) for each in choices] == list(enumerate(text for text in texts for _ in "12"))


# Events


async def test_a_streamed_chat_has_the_role_first_and_the_usage_last(serving: Serving) -> None:
    answer = await _post(serving, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *chunks, usage, end = events_of(answer.text)
    assert [each["choices"][0]["delta"] for each in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": " two"},
        {},
    ]
    assert [each["choices"][0]["finish_reason"] for each in chunks] == [None, None, None, "stop"]
    assert [each["usage"] for each in chunks] == [None] * 4
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 4)
    assert end == "[DONE]"
    assert len({each["id"] for each in [*chunks, usage]}) == 1
    assert {(each["object"], each["model"]) for each in [*chunks, usage]} == {("chat.completion.chunk", CHAT)}


async def test_streamed_completions_of_several_prompts_have_indices(serving: Serving) -> None:
    answer = await _post(serving, COMPLETIONS, prompt=["a b", "c"], stream=True, stream_options={"include_usage": True})
    *chunks, usage, end = events_of(answer.text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "a b", 1: "c"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"], end) == (3, 3, "[DONE]")


async def test_a_streamed_response_has_all_items_in_order(serving: Serving) -> None:
    service_of(serving).script = lambda _: [
        GenerationChunk(reasoning="hm", tokens=3, reasoning_tokens=2),
        GenerationChunk(text="so"),
        GenerationChunk(text="me"),
        GenerationChunk(calls=(ToolCallDelta(0, "call_1", "weather", "{"),)),
        GenerationChunk(calls=(ToolCallDelta(0, arguments="}"),)),
        GenerationChunk(finish=Finish.TOOL_CALLS),
    ]
    answer = await _post(serving, RESPONSES, stream=True)
    *events, end = events_of(answer.text)
    assert end == "[DONE]"
    reasoning = ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done"]
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    arguments = [*["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    items = [[*reasoning, "reasoning_summary_part.done"], text, arguments]
    assert [each["type"].removeprefix("response.") for each in events] == [
        *("created", "in_progress"),
        *(name for item in items for name in ("output_item.added", *item, "output_item.done")),
        "completed",
    ]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert answer.text.count("event: response.output_text.delta\n") == 2
    summary, message, call = events[-1]["response"]["output"]
    assert summary["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert message["content"][0]["text"] == "some"
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "weather", "{}")
    assert [each["output_index"] for each in events if each["type"].endswith("item.done")] == [0, 1, 2]
    assert {each["response"]["id"] for each in events if "response" in each} == {events[0]["response"]["id"]}


async def test_tool_calls_and_reasoning_are_separate_from_text(serving: Serving) -> None:
    service_of(serving).script = lambda _: [
        GenerationChunk(reasoning="hm", tokens=3, reasoning_tokens=2),
        GenerationChunk(calls=(ToolCallDelta(0, "call_1", "weather", '{"at"'),)),
        GenerationChunk(calls=(ToolCallDelta(0, arguments=": 1}"),)),
        GenerationChunk(finish=Finish.TOOL_CALLS),
    ]
    document = (await _post(serving)).json()
    streamed = await _post(serving, stream=True)
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"at": 1}'}}],
    }
    first, *deltas = [each["choices"][0]["delta"] for each in events_of(streamed.text)[:-1]]
    assert first == {"role": "assistant", "content": ""}
    first_call = {"name": "weather", "arguments": '{"at"'}
    assert deltas == [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": first_call}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]


async def test_log_probabilities_are_with_the_text_of_their_tokens(serving: Serving) -> None:
    service_of(serving).script = lambda _: [
        GenerationChunk(text="é", logprobs=(TokenLogprob("é".encode(), -0.5),), tokens=1),
        GenerationChunk(finish=Finish.LENGTH),
    ]
    token = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}
    expected = {"content": [token], "refusal": None}
    choice = (await _post(serving, logprobs=True)).json()["choices"][0]
    streamed = events_of((await _post(serving, logprobs=True, stream=True)).text)
    assert (choice["logprobs"], choice["finish_reason"]) == (expected, "length")
    assert [each["choices"][0]["logprobs"] for each in streamed[:-1]] == [None, expected, None]


async def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(serving: Serving) -> None:
    service_of(serving).script = lambda _: [
        GenerationChunk(
            text="in it",
            logprobs=(
                TokenLogprob(b"in", None),
                TokenLogprob(b" it", -1.5, offset=2, top=(LikelyToken(b" on", -0.5),)),
            ),
            finish=Finish.LENGTH,
        )
    ]
    answer = await _post(serving, COMPLETIONS, prompt="in it", echo=True, logprobs=1, max_tokens=0)
    request = service_of(serving).requests[-1]
    assert (request.echo, request.logprobs, request.sampling.max_tokens) == (True, True, 0)
    assert answer.json()["choices"] == [
        {
            "index": 0,
            "text": "in it",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["in", " it"],
                "token_logprobs": [None, -1.5],
                "top_logprobs": [None, {" on": -0.5, " it": -1.5}],
                "text_offset": [0, 2],
            },
        }
    ]


async def test_a_token_that_is_part_of_a_character_has_its_bytes(serving: Serving) -> None:
    service_of(serving).script = lambda _: [
        GenerationChunk(logprobs=(TokenLogprob(b"\xe6\x97", -1.0, top=(LikelyToken(b"\xe6\x97", -1.0),)),), tokens=1),
        GenerationChunk(text="日", logprobs=(TokenLogprob(b"\xa5", -2.0),), finish=Finish.STOP),
    ]
    chat = (await _post(serving, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    completion = (await _post(serving, COMPLETIONS, logprobs=1)).json()["choices"][0]["logprobs"]
    events = events_of((await _post(serving, COMPLETIONS, stream=True, logprobs=1)).text)[:-1]
    texts = ["bytes:\\xe6\\x97", "bytes:\\xa5"]
    assert [(each["token"], each["bytes"]) for each in chat] == [(texts[0], [0xE6, 0x97]), (texts[1], [0xA5])]
    assert (completion["tokens"], completion["text_offset"]) == (texts, [0, 0])
    assert completion["top_logprobs"] == [{texts[0]: -1.0}, None], "the most likely token of a sampled one is unknown"
    assert [each["choices"][0]["logprobs"]["tokens"] for each in events] == [[texts[0]], [texts[1]]]


_LIKELY: Final = (LikelyToken(b" on", -0.5, 7), LikelyToken(b"\xe6", -2.5, 8))
_SCORED: Final = GenerationChunk(
    text=" it",
    logprobs=(TokenLogprob(b" it", -3.5, 9, 0, _LIKELY),),
    prompt_logprobs=(TokenLogprob(b"in", None, 6), TokenLogprob(b" on", -0.5, 7, 0, _LIKELY, 1)),
    finish=Finish.LENGTH,
)
_OF_PROMPT: Final = [
    None,
    {
        "7": {"logprob": -0.5, "rank": 1, "decoded_token": " on"},
        "8": {"logprob": -2.5, "rank": 2, "decoded_token": "\ufffd"},
    },
]


async def test_a_chat_has_the_most_likely_tokens_on_request(serving: Serving) -> None:
    service_of(serving).script = lambda _: [_SCORED]
    document = (await _post(serving, logprobs=True, top_logprobs=2, prompt_logprobs=1)).json()
    request = service_of(serving).requests[-1]
    assert (request.logprobs, request.top_logprobs, request.prompt_logprobs) == (True, 2, 1)
    top = [
        {"token": " on", "logprob": -0.5, "bytes": [32, 111, 110]},
        {"token": "bytes:\\xe6", "logprob": -2.5, "bytes": [0xE6]},
    ]
    token = {"token": " it", "logprob": -3.5, "bytes": [32, 105, 116], "top_logprobs": top}
    assert document["choices"][0]["logprobs"]["content"] == [token]
    assert document["prompt_logprobs"] == _OF_PROMPT
    plain = (await _post(serving, logprobs=True)).json()
    assert plain["choices"][0]["logprobs"]["content"] == [token | {"top_logprobs": []}]
    assert "prompt_logprobs" not in plain


async def test_completions_have_the_most_likely_tokens_on_request(serving: Serving) -> None:
    service_of(serving).script = lambda _: [_SCORED, replace(_SCORED, index=1, prompt_logprobs=())]
    answer = await _post(serving, COMPLETIONS, prompt=["a", "b"], n=2, logprobs=2, prompt_logprobs=0)
    choices = answer.json()["choices"]
    request = service_of(serving).requests[-1]
    assert (request.logprobs, request.top_logprobs, request.prompt_logprobs) == (True, 2, 0)
    top = {" on": -0.5, "bytes:\\xe6": -2.5, " it": -3.5}
    assert [each["logprobs"]["top_logprobs"] for each in choices] == [[top]] * 4
    assert [each["prompt_logprobs"] for each in choices] == [_OF_PROMPT] * 4
    service_of(serving).script = lambda _: [_SCORED]
    named = await _post(serving, COMPLETIONS, logprobs=2, return_tokens_as_token_ids=True)
    (top,) = named.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top) == ["token_id:7", "token_id:8", "token_id:9"]


async def test_a_response_has_the_most_likely_tokens_on_request(serving: Serving) -> None:
    service_of(serving).script = lambda _: [_SCORED]
    fields = {"include": ["message.output_text.logprobs"]}
    for top in (0, 2):
        document = (await _post(serving, RESPONSES, **fields, top_logprobs=top)).json()
        (token,) = document["output"][0]["content"][0]["logprobs"]
        assert [each["token"] for each in token["top_logprobs"]] == [" on", "bytes:\\xe6"][:top]


async def test_tokens_without_text_add_no_items_to_a_response(serving: Serving) -> None:
    marks = [
        GenerationChunk(logprobs=(TokenLogprob(text, -1.0),), tokens=1) for text in (b"\xc3", b"<tool>", b"</tool>")
    ]
    text = GenerationChunk(text="\u00e9", logprobs=(TokenLogprob(b"\xa9", -2.0),), tokens=1)
    parts = [
        GenerationChunk(calls=(ToolCallDelta(0, *part),), logprobs=(TokenLogprob(b"x", -3.0),), tokens=1)
        for part in (("a", "weather", '{"x": '), ("", "", "1}"))
    ]
    call = [marks[1], parts[0], marks[1], parts[1], marks[2], GenerationChunk(finish=Finish.TOOL_CALLS)]
    fields = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}

    async def items(*pieces: GenerationChunk) -> list[Any]:
        service_of(serving).script = lambda _: pieces
        output: list[Any] = (await _post(serving, RESPONSES, **fields)).json()["output"]
        return [
            item["arguments"]
            if item["type"] == "function_call"
            else [token["logprob"] for token in item["content"][0]["logprobs"]]
            for item in output
        ]

    assert await items(*call) == ['{"x": 1}']
    assert await items(marks[0], text, *call) == [[-1.0, -2.0, -1.0], '{"x": 1}']
    assert await items(marks[0], GenerationChunk(finish=Finish.STOP)) == [[-1.0]]


async def test_a_failure_within_a_streamed_chat_is_the_last_event(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="a"), ModelFailure("the engine ended")]
    *chunks, last = events_of((await _post(serving, stream=True)).text)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "a"}
    assert last == {"error": {"message": "the engine ended", "type": "server_error", "param": None, "code": None}}


async def test_a_failure_within_a_streamed_response_is_a_failed_event(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="a"), ModelFailure("the engine ended")]
    *_, failed, end = events_of((await _post(serving, RESPONSES, stream=True)).text)
    assert (failed["type"], end) == ("response.failed", "[DONE]")
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine ended"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"


# Requests of the service


async def test_sampling_fields_reach_the_service(serving: Serving) -> None:
    sampling: dict[str, Any] = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.1,
        "length_penalty": 0.9,
        "seed": 4294967295,
        "ignore_eos": True,
        "num_assistant_tokens": 4,
        "max_ngram_size": 2,
    }
    request = await _request(
        serving,
        **sampling,
        stop_token_ids=[3],
        max_completion_tokens=7,
        max_tokens=5,
        stop=["x", "y"],
        n=2,
        logprobs=True,
    )
    assert request.sampling == Sampling(max_tokens=7, stop_token_ids=(3,), **sampling)
    confidence = (await _request(serving, assistant_confidence_threshold=0.4)).sampling
    assert confidence == Sampling(assistant_confidence_threshold=0.4)
    assert (request.stop, request.includes_stop, request.n, request.logprobs, request.parses_output) == (
        ("x", "y"),
        False,
        2,
        True,
        True,
    )
    assert (await _request(serving, temperature=None, stop="x")).sampling == Sampling()


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1, 2**64 - 1, -2, -(2**63)])
async def test_seeds_have_64_bits(serving: Serving, seed: int) -> None:
    assert (await _request(serving, seed=seed)).sampling == Sampling(seed=seed)


async def test_minus_one_is_a_random_seed_and_as_many_tokens_as_fit(serving: Serving) -> None:
    assert (await _request(serving, seed=-1, max_tokens=-1)).sampling == Sampling()
    assert (await _request(serving, max_completion_tokens=-1)).sampling == Sampling()


async def test_parts_of_a_content_are_joined_and_roles_are_those_of_templates(serving: Serving) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [], "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]
    request = await _request(serving, messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert request.prompt == Conversation(
        (
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "a\nb", "name": "me"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            {"role": "assistant", "content": "x"},
        ),
        template_options={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"verbosity": "high"}, {"verbosity": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
    ],
)
async def test_effort_and_verbosity_are_template_variables(
    serving: Serving, fields: Any, options: dict[str, Any]
) -> None:
    assert (await _request(serving, **fields)).prompt.template_options == options


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": None}, {"reasoning": "hm", "reasoning_content": ""}],
)
async def test_reasoning_of_earlier_messages_has_both_names_in_templates(serving: Serving, fields: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok", **fields}]
    message = (await _request(serving, messages=messages)).prompt.messages[1]
    assert message == {"role": "assistant", "content": "ok", "reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("fields", "continues", "options"),
    [
        ({}, False, {}),
        ({"continue_final_message": False}, False, {}),
        ({"continue_final_message": True}, True, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            True,
            {"add_generation_prompt": False},
        ),
        ({"add_generation_prompt": False}, False, {"add_generation_prompt": False}),
        (
            {"chat_template_kwargs": {"continue_final_message": True, "x": 1}},
            True,
            {"add_generation_prompt": False, "continue_final_message": True, "x": 1},
        ),
        (
            {"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
            False,
            {"add_generation_prompt": False},
        ),
    ],
)
async def test_the_final_message_may_be_continued(
    serving: Serving, fields: Any, continues: bool, options: dict[str, Any]
) -> None:
    prompt = (await _request(serving, **fields)).prompt
    assert (prompt.continues_final_message, prompt.template_options) == (continues, options)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "", 1)),
        ("required", ("required", "", 1)),
        ("none", ("none", "", 0)),
        ({"type": "function", "function": {"name": "weather"}}, ("function", "weather", 1)),
        ({"type": "function", "name": "weather"}, ("function", "weather", 1)),
    ],
)
async def test_tools_and_their_choice_reach_the_service(
    serving: Serving, choice: Any, expected: tuple[str, str, int]
) -> None:
    prompt = (await _request(serving, tools=[TOOL], tool_choice=choice)).prompt
    assert (prompt.tool_choice, prompt.tool_name, len(prompt.tools)) == expected
    assert all(tool == TOOL for tool in prompt.tools)


_STRUCTURE: Final = {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}
_TAG: Final = (
    '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f"],"tags":[{"type":"tag",'
    '"begin":"<f=a>","content":{"type":"json_schema","json_schema":{"type":"object"}},"end":"</f>"}]}}'
)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT, "")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', is_strict=True),
        ),
        (
            {"type": "structural_tag", "structures": [_STRUCTURE], "triggers": ["<f"]},
            Grammar(GrammarKind.STRUCTURAL_TAG, _TAG),
        ),
        ({"type": "regex", "regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"type": "grammar", "grammar": "root ::= x"}, Grammar(GrammarKind.EBNF, "root ::= x")),
    ],
)
async def test_the_response_format_becomes_a_grammar(serving: Serving, sent: Any, expected: Grammar | None) -> None:
    assert (await _request(serving, response_format=sent)).grammar == expected


async def test_the_schema_of_a_json_object_is_a_schema(serving: Serving) -> None:
    request = await _request(serving, response_format={"type": "json_object", "schema": {"type": "integer"}})
    assert request.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer"}')


async def test_errors_of_grammars_prompts_and_tools_name_the_field_of_the_request(serving: Serving) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {}}
    response = await _request(serving, RESPONSES, text={"format": form}, tools=[{"type": "function", **FUNCTION}])
    assert response.grammar.field == "text.format"
    assert (response.prompt_field, response.prompt.parameters_fields) == ("input", ("tools[0].parameters",))
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    chat = await _request(serving, tools=[other, TOOL], tool_choice=allowed, response_format=form)
    assert chat.grammar.field == "response_format"
    assert (chat.prompt_field, chat.prompt.parameters_fields) == ("messages", ("tools[1].function.parameters",))
    await _request(serving, COMPLETIONS, prompt=["one", "two"])
    assert [each.prompt_field for each in service_of(serving).requests[-2:]] == ["prompt[0]", "prompt[1]"]
    assert (await _request(serving, COMPLETIONS, prompt=[5, 6])).prompt_field == "prompt"


_NUMBER: Final = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer"}', is_strict=True)
_CHOICES: Final = Grammar(GrammarKind.EBNF, 'root ::= "yes" | "it\'s \\"no\\"\\n"\n')


@pytest.mark.parametrize(
    ("sent", "expected", "field"),
    [
        ({"guided_json": {"type": "integer"}}, _NUMBER, "guided_json"),
        ({"guided_json": '{"type":"integer"}'}, _NUMBER, "guided_json"),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, Grammar(GrammarKind.REGEX, "a+"), ""),
        ({"guided_grammar": "root ::= x"}, Grammar(GrammarKind.EBNF, "root ::= x"), ""),
        ({"guided_choice": ["yes", 'it\'s "no"\n', "yes"]}, _CHOICES, ""),
        ({"structural_tag": _TAG}, Grammar(GrammarKind.STRUCTURAL_TAG, _TAG), ""),
        (
            {"structured_outputs": {"json": {"type": "integer"}, "disable_any_whitespace": True}},
            _NUMBER,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["yes", 'it\'s "no"\n']}}, _CHOICES, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT, ""), ""),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None, ""),
    ],
)
async def test_structured_outputs_of_vllm_become_the_same_grammars(
    serving: Serving, sent: Any, expected: Grammar | None, field: str
) -> None:
    for path, body in (("/v3/chat/completions", chat_body(**sent)), ("/v3/completions", {"prompt": "a", **sent})):
        answer = await serving.post(path, json={"model": CHAT, **body})
        assert answer.status_code == 200, answer.text
        grammar = service_of(serving).requests[-1].grammar
        assert grammar == expected
        assert grammar is None or grammar.field == (field or grammar.field)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_final_message_of_an_assistant(serving: Serving, *, stream: bool) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two"}]
    for sent, expected in ((messages, "one twoone two"), (messages[:1], "hi")):
        answer = await _post(
            serving, messages=sent, echo=True, continue_final_message=len(sent) > 1, stream=stream, n=2
        )
        texts = ["", ""]
        for each in events_of(answer.text)[:-1] if stream else [answer.json()]:
            for choice in each["choices"]:
                texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
        assert texts == [expected] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_on_request(serving: Serving, *, stream: bool) -> None:
    service_of(serving).script = lambda _: (
        GenerationChunk(reasoning="hm", tokens=3, reasoning_tokens=2),
        GenerationChunk(text="so", tokens=1, finish=Finish.STOP),
    )
    for include in (True, False):
        answer = await _post(serving, include_reasoning=include, stream=stream)
        assert ("hm" in answer.text) is include
        assert "so" in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_name_tokens_by_their_numbers_on_request(serving: Serving, *, stream: bool) -> None:
    token = TokenLogprob(b"so", -0.5, id=7)
    service_of(serving).script = lambda _: (
        GenerationChunk(text="so", tokens=1, logprobs=(token,), finish=Finish.STOP),
    )
    for path, logprobs, names in ((CHATS, True, ["token"]), (COMPLETIONS, 1, ["tokens", 0])):
        answer = await _post(serving, path, logprobs=logprobs, return_tokens_as_token_ids=True, stream=stream)
        events = events_of(answer.text)[:-1] if stream else [answer.json()]
        (found,) = [each for event in events for choice in event["choices"] if (each := choice["logprobs"])]
        named: Any = found["content"][0] if path == CHATS else found
        for name in names:
            named = named[name]
        assert named == "token_id:7"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"add_special_tokens": True}, {"adds_special_tokens": True}),
        ({"add_special_tokens": False}, {"adds_special_tokens": False}),
        ({"truncate_prompt_tokens": 5}, {"prompt_limit": 5}),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, {"prompt_limit": -1, "truncates_end": True}),
        ({"bad_words": ["a", "b", "a"]}, {"bad_words": ("a", "b")}),
    ],
)
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_fields_of_vllm_reach_the_service(serving: Serving, path: str, sent: Any, expected: Any) -> None:
    request = await _request(serving, path, **sent)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"use_beam_search": True}, Sampling(temperature=0)),
        ({"use_beam_search": True, "n": 3}, Sampling(best_of=3)),
        ({"use_beam_search": True, "n": 2, "best_of": 4}, Sampling(best_of=4)),
        ({"use_beam_search": False, "n": 3}, Sampling()),
    ],
)
async def test_beam_search_has_a_beam_for_each_choice(serving: Serving, sent: Any, expected: Sampling) -> None:
    assert (await _request(serving, **sent)).sampling == expected


async def test_verbosity_of_a_response_is_a_template_variable(serving: Serving) -> None:
    request = await _request(serving, RESPONSES, text={"verbosity": "low"}, chat_template_kwargs={"x": 1})
    assert request.prompt.template_options == {"verbosity": "low", "x": 1}


async def test_documents_are_a_template_variable(serving: Serving) -> None:
    documents = [{"title": "a", "text": "b"}]
    request = await _request(serving, documents=documents, chat_template_kwargs={"x": 1})
    assert request.prompt.template_options == {"documents": documents, "x": 1}


async def test_input_items_of_a_response_become_messages(serving: Serving) -> None:
    function = FUNCTION | {"strict": True}
    tool = {"type": "function", **function}
    request = await _request(
        serving,
        RESPONSES,
        instructions="be short",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        ],
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for name in ("c1", "c2")
    ]
    assert request.prompt == Conversation(
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
    assert request.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


async def test_max_tokens_up_to_the_limit_of_the_model_are_accepted(serving: Serving) -> None:
    service_of(serving).limits = GenerationLimits(max_tokens_limit=10)
    assert (await _request(serving, max_tokens=10)).sampling.max_tokens == 10
    refused = await serving.post(CHATS, json=chat_body(max_tokens=11))
    assert refused.json()["error"]["message"] == "max_tokens exceeds limit provided in graph config: 10; got 11"


# Refusals, deadlines and clients that disconnect


async def test_a_model_of_tensors_is_refused_and_counted(serving: Serving) -> None:
    answer = await serving.post(CHATS, json={**chat_body(), "model": "echo"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "unsupported")
    assert error["message"] == 'the service "echo" does no text_generation; it is a model that takes tensors'
    labels = 'api="V3",interface="REST",method="Unary",name="echo",version="2"'
    assert f"ovms_requests_fail{{{labels}}} 1.0" in (await serving.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_answered_with_a_time_to_retry(serving: Serving, stream: bool) -> None:
    service_of(serving).refusal = Overloaded("256 requests wait", retry_after_seconds=7)
    answer = await serving.post(CHATS, json=chat_body(stream=stream))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_the_generation(serving: Serving, stream: bool) -> None:
    service_of(serving).script = lambda _: [trio.Event()]
    answer = await serving.post(CHATS, json=chat_body(stream=stream), headers={"X-Request-Timeout": "0.05"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert service_of(serving).running == 0


async def test_a_malformed_deadline_is_refused(serving: Serving) -> None:
    answer = await serving.post(CHATS, json=chat_body(), headers={"X-Request-Timeout": "soon"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")


_LAST = {CHATS: b"[DONE]", RESPONSES: b"response.completed", "/v1/messages": b"message_stop"}


@pytest.mark.parametrize("path", _LAST)
async def test_silent_streams_have_comments_on_request(tmp_path: Path, path: str) -> None:
    more = {"input": "a"} if path == RESPONSES else {"max_tokens": 9} if path == "/v1/messages" else {}
    body = {**({} if path == RESPONSES else chat_body()), "model": CHAT, "stream": True, **more}
    async with serve_openai(tmp_path, front_end={"sse_keep_alive_interval": 0.05}) as serving:
        for end in (GenerationChunk(finish=Finish.STOP), ModelFailure("the engine ended")):
            is_ready = trio.Event()
            steps = [is_ready, GenerationChunk(text="done"), end]
            service_of(serving).script = lambda _, steps=steps: steps
            with trio.fail_after(WAIT_SECONDS):
                async with serving.connect() as peer:
                    await peer.send(post_of(path, body))
                    for _ in range(3):
                        await peer.until(b": keep-alive\n\n")
                    is_ready.set()
                    last = b"the engine ended" if isinstance(end, ModelFailure) else _LAST[path]
                    assert b"done" in await peer.until(last)
        assert service_of(serving).running == 0


async def test_streams_have_no_comments_by_default_and_while_events_come(tmp_path: Path) -> None:
    async with serve_openai(tmp_path, front_end={"sse_keep_alive_interval": 3600}) as serving:
        answer = await serving.post(CHATS, json=chat_body(stream=True))
        assert (answer.status_code, "keep-alive" in answer.text) == (200, False)
        service_of(serving).refusal = Overloaded("256 requests wait", retry_after_seconds=7)
        assert (await serving.post(CHATS, json=chat_body(stream=True))).status_code == 429


# Connections and metrics


async def test_streams_are_answered_on_the_fast_lane_of_a_kept_connection(serving: Serving) -> None:
    async with serving.connect() as peer:
        for _ in range(2):
            await peer.send(post_of(CHATS, chat_body("a", stream=True)))
            assert (await peer.until(b"\r\n0\r\n\r\n")).count(b"[DONE]") == 1
    route = make_rest_router(serving.plane).find("POST", CHATS)
    assert isinstance(route, Route)
    assert route.is_hot


async def test_a_body_in_chunks_is_answered_with_the_same_events(serving: Serving) -> None:
    async def choices(content: Any) -> list[Any]:
        answer = await serving.post(CHATS, content=content, headers={"content-type": "application/json"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [each if isinstance(each, str) else each["choices"] for each in events_of(answer.text)]

    body = json.dumps(chat_body("a b c", stream=True)).encode()
    assert await choices(iter([body[:20], body[20:]])) == await choices(body)


async def test_calls_are_counted_by_api_method_and_result(serving: Serving) -> None:
    await serving.post(CHATS, json=chat_body())
    await serving.post(CHATS, json=chat_body(stream=True))
    await serving.post(CHATS, json=chat_body(n=0))
    text = (await serving.get("/metrics")).text
    labels = f'api="V3",interface="REST",method="{{}}",name="{CHAT}",version="1"'
    assert f"ovms_requests_success{{{labels.format('Unary')}}} 1.0" in text
    assert f"ovms_requests_success{{{labels.format('Stream')}}} 1.0" in text
    assert f"ovms_requests_fail{{{labels.format('Unary')}}} 1.0" in text
