"""Chats over OpenAI's API: what a body asks the service for, and what is told of its pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import ModelFailure, Overloaded
from ovmstrio.core.generation import (
    CallDelta,
    Conversation,
    Finish,
    GenerationLimits,
    Grammar,
    GrammarKind,
    Piece,
    Sampling,
    TokenLogprob,
)
from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.router import Route
from tests.service.api.rest.openai.talking import chat_body, events_of, generator_of, post_of
from tests.support.text_generators import CHAT
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Serving

PATH = "/v3/chat/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def _asked(serving: Serving, **more: Any) -> Any:
    """Give what the service was asked for by a body with more in it."""
    answer = await serving.post(PATH, json=chat_body(**more))
    assert answer.status_code == 200, answer.text
    return generator_of(serving).requests[-1]


async def _error(serving: Serving, **more: Any) -> dict[str, Any]:
    answer = await serving.post(PATH, json={**chat_body(), **more})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("prefix", ["/v3", "/v1", "/v3/v1"])
async def test_a_chat_is_answered_with_one_document(serving: Serving, prefix: str) -> None:
    """It has what strict clients insist on."""
    answer = await serving.post(f"{prefix}/chat/completions", json=chat_body("one two three"))

    document = answer.json()
    assert answer.status_code == 200
    assert document.pop("id").startswith("chatcmpl-")
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "chat.completion",
        "model": CHAT,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_a_streamed_chat_says_its_role_first_and_its_usage_last(serving: Serving) -> None:
    """With an id that all events share, and an end."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await serving.post(PATH, json=chat_body("one two", **options))

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


async def test_every_field_of_sampling_reaches_the_service(serving: Serving) -> None:
    """As it was sent; what is not there is left to the model."""
    sent = {
        "max_completion_tokens": 7,
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
        "stop_token_ids": [3],
        "num_assistant_tokens": 4,
        "max_ngram_size": 2,
    }
    asked = await _asked(serving, **sent, max_tokens=5, stop=["x", "y"], n=2, logprobs=True)

    assert asked.sampling == Sampling(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.1,
        length_penalty=0.9,
        seed=4294967295,
        ignore_eos=True,
        stop_token_ids=(3,),
        num_assistant_tokens=4,
        max_ngram_size=2,
    )
    sampling = (await _asked(serving, assistant_confidence_threshold=0.4)).sampling
    assert sampling == Sampling(assistant_confidence_threshold=0.4)
    assert (asked.stop, asked.keeps_stop, asked.n, asked.logprobs, asked.parses) == (("x", "y"), False, 2, True, True)
    assert (await _asked(serving, temperature=None, stop="x")).sampling == Sampling()


async def test_parts_of_a_content_become_one_text_and_roles_those_that_templates_know(serving: Serving) -> None:
    """What templates use beside them stays."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [], "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]
    asked = await _asked(serving, messages=messages, chat_template_kwargs={"enable_thinking": False})

    assert asked.prompt == Conversation(
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
    ("choice", "expected"),
    [
        (None, ("auto", "", 1)),
        ("required", ("required", "", 1)),
        ("none", ("none", "", 0)),
        ({"type": "function", "function": {"name": "weather"}}, ("function", "weather", 1)),
        ({"type": "function", "name": "weather"}, ("function", "weather", 1)),
    ],
)
async def test_tools_and_the_choice_among_them_reach_the_service(
    serving: Serving, choice: Any, expected: tuple[str, str, int]
) -> None:
    """None of them where none may be called."""
    asked = await _asked(serving, tools=[TOOL], tool_choice=choice)

    prompt = asked.prompt
    assert (prompt.tool_choice, prompt.tool_name, len(prompt.tools)) == expected
    assert all(tool == TOOL for tool in prompt.tools)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT, "")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ),
        ({"type": "regex", "regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"type": "grammar", "grammar": "root ::= x"}, Grammar(GrammarKind.EBNF, "root ::= x")),
    ],
)
async def test_the_form_of_an_answer_reaches_the_service(serving: Serving, sent: Any, expected: Grammar | None) -> None:
    """As a grammar."""
    assert (await _asked(serving, response_format=sent)).grammar == expected


async def test_calls_of_tools_and_reasoning_are_told_apart_from_text(serving: Serving) -> None:
    """Whole and bit by bit."""
    generator_of(serving).script = lambda _: [
        Piece(reasoning="hm", tokens=3, reasoning_tokens=2),
        Piece(calls=(CallDelta(0, "call_1", "weather", '{"at"'),)),
        Piece(calls=(CallDelta(0, arguments=": 1}"),)),
        Piece(finish=Finish.TOOL_CALLS),
    ]
    document = (await serving.post(PATH, json=chat_body())).json()
    streamed = await serving.post(PATH, json=chat_body(stream=True))

    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    (whole,) = document["choices"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"at": 1}'}}],
    }
    first, *deltas = [each["choices"][0]["delta"] for each in events_of(streamed.text)[:-1]]
    assert first == {"role": "assistant", "content": ""}
    assert deltas == [
        {"reasoning_content": "hm"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"at"'},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]


async def test_probabilities_of_tokens_come_with_them(serving: Serving) -> None:
    """Streams have them with the text that they belong to."""
    generator_of(serving).script = lambda _: [
        Piece(text="é", logprobs=(TokenLogprob("é", -0.5),), tokens=1),
        Piece(finish=Finish.LENGTH),
    ]
    expected = {
        "content": [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}],
        "refusal": None,
    }
    whole = (await serving.post(PATH, json=chat_body(logprobs=True))).json()["choices"][0]
    streamed = events_of((await serving.post(PATH, json=chat_body(logprobs=True, stream=True))).text)

    assert (whole["logprobs"], whole["finish_reason"]) == (expected, "length")
    assert [each["choices"][0]["logprobs"] for each in streamed[:-1]] == [None, expected, None]


async def test_several_texts_have_their_own_indices(serving: Serving) -> None:
    """Each with its role and its end."""
    whole = (await serving.post(PATH, json=chat_body("a b", n=2))).json()
    streamed = events_of((await serving.post(PATH, json=chat_body("a", n=2, stream=True))).text)[:-1]

    assert [(each["index"], each["message"]["content"]) for each in whole["choices"]] == [(0, "a b"), (1, "a b")]
    assert [each["choices"][0]["index"] for each in streamed] == [0, 0, 0, 1, 1, 1]
    assert whole["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"messages": None}, "Messages missing in request", "messages"),
        ({"messages": "x"}, "Messages are not an array; got 'x'", "messages"),
        ({"messages": []}, "Messages array cannot be empty", "messages"),
        ({"messages": ["x"]}, "Message is not a JSON object; got 'x'", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "Every message must have 'role' field", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "Unsupported content type; got 'image_url', and this model reads text only",
            "messages[0].content[0].type",
        ),
        ({"max_tokens": 0}, "max_tokens value should be greater than 0; got 0", "max_tokens"),
        ({"max_tokens": -1}, "max_tokens is not an unsigned integer; got -1", "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens is not an unsigned integer; got '7'", "max_tokens"),
        ({"temperature": 2.1}, "temperature out of range(0.0, 2.0); got 2.1", "temperature"),
        ({"temperature": True}, "temperature is not a valid number; got True", "temperature"),
        ({"top_p": 1.1}, "top_p out of range(0.0, 1.0); got 1.1", "top_p"),
        ({"top_k": 0}, "top_k must be -1 (all tokens) or a positive integer; got 0", "top_k"),
        ({"min_p": 1}, "min_p out of range [0.0, 1.0); got 1", "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty out of range(-2.0, 2.0); got 3", "frequency_penalty"),
        ({"repetition_penalty": "x"}, "repetition_penalty is not a valid number; got 'x'", "repetition_penalty"),
        ({"seed": -1}, "seed out of range [0, 4294967295]; got -1", "seed"),
        ({"stop": ["x"] * 17}, "stop array must have no more than 16 strings; got 17", "stop"),
        ({"stop": [1]}, "stop array contains non string element", "stop"),
        ({"stop": ""}, "stop array contains an empty string", "stop"),
        ({"n": 3, "best_of": 2}, "n value cannot be greater than best_of; got 3 and 2", "n"),
        ({"best_of": 21}, "best_of exceeds limit provided in graph config: 20; got 21", "best_of"),
        ({"stream_options": {}}, "stream_options provided, but stream not set to true", "stream_options"),
        ({"tool_choice": "x"}, "tool_choice should be either 'none' or 'auto' or 'required'; got 'x'", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice is only allowed when tools are specified", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "Only function tools are supported; got 'web_search'", "tools[0].type"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object; got a list", "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "is missing", "response_format.json_schema"),
        ({"logit_bias": {"1": 5}}, "logit_bias is not supported", "logit_bias"),
        ({"guided_json": {"type": "object"}}, "guided_json is not supported: use response_format", "guided_json"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids is not supported", "allowed_token_ids"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "parallel_tool_calls"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens value should be at least 1", "num_assistant_tokens"),
        ({"max_ngram_size": 101}, "max_ngram_size value can't be greater than 100", "max_ngram_size"),
        (
            {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4},
            "num_assistant_tokens and assistant_confidence_threshold are mutually exclusive",
            "num_assistant_tokens",
        ),
        ({"assistant_confidence_threshold": 0}, "should be above 0", "assistant_confidence_threshold"),
        ({"top_logprobs": 2}, "top_logprobs above 0 is not supported", "top_logprobs"),
        ({"store": True}, "store is not supported: nothing is stored", "store"),
    ],
)
async def test_a_field_that_cannot_be_is_named(serving: Serving, more: Any, message: str, param: str) -> None:
    """With OVMS's words and what came."""
    error = await _error(serving, **more)

    assert message in error["message"]
    assert error["param"] == param


async def test_a_model_that_makes_no_text_is_refused_for_good(serving: Serving) -> None:
    """Its caller is told what it is, and does not try again; the call is counted as failed."""
    answer = await serving.post(PATH, json={**chat_body(), "model": "echo"})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported")
    assert error["message"] == 'the service "echo" does no text_generation; it is a model that takes tensors'
    labels = 'api="V3",interface="REST",method="Unary",name="echo",version="2"'
    assert f"ovms_requests_fail{{{labels}}} 1.0" in (await serving.get("/metrics")).text


async def test_all_that_is_wrong_is_told_at_once(serving: Serving) -> None:
    """The first field is the one that programs are told."""
    error = await _error(serving, temperature=9, n=0, messages=[])

    assert error["param"] == "messages"
    for said in ("Messages array cannot be empty", "temperature out of range", "n value should be greater than 0"):
        assert said in error["message"]


async def test_texts_that_cannot_fit_are_refused_before_they_are_counted(serving: Serving) -> None:
    """Ten megabytes would keep a tokenizer busy for seconds."""
    error = await _error(serving, messages=[{"role": "user", "content": "x" * 10_000_000}])

    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 1000 tokens" in error["message"]
    assert not generator_of(serving).requests


async def test_a_limit_of_the_model_is_told(serving: Serving) -> None:
    """As the graph's configuration has it."""
    generator_of(serving).limits = GenerationLimits(max_tokens_limit=10)

    assert (await _asked(serving, max_tokens=10)).sampling.max_tokens == 10
    error = await _error(serving, max_tokens=11)
    assert error["message"] == "max_tokens exceeds limit provided in graph config: 10; got 11"


async def test_a_full_queue_says_when_to_come_again(serving: Serving) -> None:
    """For streams, too, whose answer has not begun."""
    generator_of(serving).refusal = Overloaded("256 requests wait", retry_after_seconds=7)
    for stream in (False, True):
        answer = await serving.post(PATH, json=chat_body(stream=stream))

        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_failure_within_a_stream_is_its_last_event(serving: Serving) -> None:
    """No end follows, so that nobody takes the half for the whole."""
    generator_of(serving).script = lambda _: [Piece(text="a"), ModelFailure("the engine ended")]

    *chunks, last = events_of((await serving.post(PATH, json=chat_body(stream=True))).text)

    assert chunks[-1]["choices"][0]["delta"] == {"content": "a"}
    assert last == {"error": {"message": "the engine ended", "type": "server_error", "param": None, "code": None}}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_given_up(serving: Serving, stream: bool) -> None:
    """Its client has said how long it waits."""
    generator_of(serving).script = lambda _: [trio.Event()]

    answer = await serving.post(PATH, json=chat_body(stream=stream), headers={"X-Request-Timeout": "0.05"})

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert generator_of(serving).running == 0


async def test_a_time_that_is_none_is_refused(serving: Serving) -> None:
    """With the header's name."""
    answer = await serving.post(PATH, json=chat_body(), headers={"X-Request-Timeout": "soon"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(serving: Serving, stream: bool) -> None:
    """While it waits for the answer, and in the midst of one."""
    generator_of(serving).script = lambda _: [Piece(text="a"), trio.Event()]
    with trio.fail_after(WAIT_SECONDS):
        async with serving.connect() as peer:
            await peer.send(post_of(PATH, chat_body(stream=stream)))
            await generator_of(serving).waiting.wait()
        await generator_of(serving).left.wait()
    assert generator_of(serving).running == 0


async def test_streams_are_answered_on_the_fast_lane_and_its_connection_goes_on(serving: Serving) -> None:
    """Nothing of a framework is between the pieces and the socket."""
    async with serving.connect() as peer:
        for _ in range(2):
            await peer.send(post_of(PATH, chat_body("a", stream=True)))
            text = b""
            with trio.fail_after(WAIT_SECONDS):
                while not text.endswith(b"0\r\n\r\n"):
                    text += await peer.stream.receive_some()
            assert text.count(b"[DONE]") == 1
    route = make_router(serving.plane).find("POST", PATH)
    assert isinstance(route, Route)
    assert route.is_hot


async def test_a_body_in_chunks_is_answered_with_the_same_events(serving: Serving) -> None:
    """It is the framework that reads it; ids and times are left out."""

    async def told(content: Any) -> list[Any]:
        answer = await serving.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [each if isinstance(each, str) else each["choices"] for each in events_of(answer.text)]

    body = json.dumps(chat_body("a b c", stream=True)).encode()
    assert await told(iter([body[:20], body[20:]])) == await told(body)


async def test_calls_are_counted_as_ovms_counts_them(serving: Serving) -> None:
    """By API and method, and by how they ended."""
    await serving.post(PATH, json=chat_body())
    await serving.post(PATH, json=chat_body(stream=True))
    await serving.post(PATH, json=chat_body(n=0))

    text = (await serving.get("/metrics")).text
    labels = f'api="V3",interface="REST",method="{{}}",name="{CHAT}",version="1"'
    assert f"ovms_requests_success{{{labels.format('Unary')}}} 1.0" in text
    assert f"ovms_requests_success{{{labels.format('Stream')}}} 1.0" in text
    assert f"ovms_requests_fail{{{labels.format('Unary')}}} 1.0" in text
