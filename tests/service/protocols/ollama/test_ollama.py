"""Ollama's API over scripted services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.core.errors import ContextExceeded, ModelFailure, Overloaded
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    LikelyToken,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
)
from tests.service.protocols.openai.servers import CHAT, WORDS, serve_openai, service_of
from tests.support.callers import gate_of
from tests.unit.protocols.servers import Serving

CHATS, TEXTS = "/api/chat", "/api/generate"
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHATS: {"model": CHAT, "messages": [{"role": "user", "content": "one two"}]},
    TEXTS: {"model": CHAT, "prompt": "one two"},
}
TOOL: Final = {"type": "function", "function": {"name": "city", "parameters": {"type": "object", "properties": {}}}}
DURATIONS: Final = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def _answer(serving: Serving, path: str = CHATS, **more: Any) -> dict[str, Any]:
    answer = await serving.post(path, json=BODIES[path] | {"stream": False} | more)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def _lines(serving: Serving, path: str = CHATS, **more: Any) -> list[dict[str, Any]]:
    answer = await serving.post(path, json=BODIES[path] | more)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def _request(serving: Serving, path: str = CHATS, **more: Any) -> GenerationRequest:
    await _answer(serving, path, **more)
    request: GenerationRequest = service_of(serving).requests[-1]
    return request


async def _conversation(serving: Serving, path: str = CHATS, **more: Any) -> Conversation:
    prompt = (await _request(serving, path, **more)).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def _script(serving: Serving, *pieces: GenerationChunk | Exception) -> None:
    service_of(serving).script = lambda _: pieces


def _pop_figures(document: dict[str, Any]) -> None:
    assert document.pop("created_at").endswith("Z")
    durations = [document.pop(name) for name in DURATIONS]
    assert durations[0] >= durations[2] + durations[3] - 1
    assert all(isinstance(each, int) and each >= 0 for each in durations)


# Answers

END: Final = {"done": True, "done_reason": "stop", "prompt_eval_count": 2, "eval_count": 2}


@pytest.mark.parametrize(
    ("path", "content"),
    [(CHATS, {"message": {"role": "assistant", "content": "one two"}}), (TEXTS, {"response": "one two"})],
)
async def test_a_text_is_answered_with_one_document(serving: Serving, path: str, content: dict[str, Any]) -> None:
    document = await _answer(serving, path)
    _pop_figures(document)
    assert document == {"model": CHAT, **content, **END}


async def test_answers_stream_by_default_as_lines(serving: Serving) -> None:
    *lines, last = await _lines(serving)
    assert [line["message"] for line in lines] == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": " two"},
    ]
    assert all(line["done"] is False and line["model"] == CHAT for line in lines)
    _pop_figures(last)
    assert last == {"model": CHAT, "message": {"role": "assistant", "content": ""}, **END}
    texts = await _lines(serving, TEXTS)
    assert [line["response"] for line in texts] == ["one", " two", ""]


async def test_an_answer_that_was_cut_off_has_the_reason_length(serving: Serving) -> None:
    _script(serving, GenerationChunk(text="a", tokens=1, finish=Finish.LENGTH))
    assert (await _answer(serving))["done_reason"] == "length"
    assert (await _lines(serving))[-1]["done_reason"] == "length"


async def test_reasoning_is_in_its_own_field(serving: Serving) -> None:
    _script(
        serving,
        GenerationChunk(reasoning="I think."),
        GenerationChunk(text="Yes."),
        GenerationChunk(finish=Finish.STOP),
    )
    assert (await _answer(serving))["message"] == {"role": "assistant", "content": "Yes.", "thinking": "I think."}
    assert (await _lines(serving))[0]["message"] == {"role": "assistant", "content": "", "thinking": "I think."}
    document = await _answer(serving, TEXTS)
    assert (document["response"], document["thinking"]) == ("Yes.", "I think.")


async def test_tool_calls_are_sent_when_they_are_complete(serving: Serving) -> None:
    _script(
        serving,
        GenerationChunk(text="I call"),
        GenerationChunk(calls=(ToolCallDelta(0, "call_1", "city", '{"name": '),)),
        GenerationChunk(calls=(ToolCallDelta(0, arguments='"Paris"}'), ToolCallDelta(1, "call_2", "city", "{}"))),
        GenerationChunk(finish=Finish.TOOL_CALLS),
    )
    calls = [
        {"id": "call_1", "function": {"index": 0, "name": "city", "arguments": {"name": "Paris"}}},
        {"id": "call_2", "function": {"index": 1, "name": "city", "arguments": {}}},
    ]
    document = await _answer(serving, tools=[TOOL])
    assert (document["message"]["tool_calls"], document["done_reason"]) == (calls, "stop")
    lines = await _lines(serving, tools=[TOOL])
    assert [line["message"].get("tool_calls") for line in lines] == [None, calls[:1], calls[1:], None]


async def test_a_call_that_was_cut_off_is_left_out(serving: Serving) -> None:
    call = ToolCallDelta(0, "call_1", "city", '{"name": ')
    _script(serving, GenerationChunk(calls=(call,)), GenerationChunk(finish=Finish.LENGTH))
    assert (await _answer(serving, tools=[TOOL]))["message"] == {"role": "assistant", "content": ""}
    assert [line["message"] for line in await _lines(serving, tools=[TOOL])] == [{"role": "assistant", "content": ""}]


async def test_log_probabilities_come_with_their_text(serving: Serving) -> None:
    _script(
        serving,
        GenerationChunk(text="a", logprobs=(TokenLogprob(b"a", -0.5),)),
        GenerationChunk(text="b", logprobs=(TokenLogprob(b"b", -1.5),), finish=Finish.STOP),
    )
    tokens = [
        {"token": token, "logprob": value, "bytes": [ord(token)], "top_logprobs": []}
        for token, value in (("a", -0.5), ("b", -1.5))
    ]
    assert (await _answer(serving, logprobs=True))["logprobs"] == tokens
    assert [line.get("logprobs") for line in await _lines(serving, logprobs=True)] == [tokens[:1], tokens[1:], None]


async def test_an_answer_has_the_most_likely_tokens_on_request(serving: Serving) -> None:
    top = (LikelyToken(b"b", -0.1), LikelyToken(b"a", -0.5))
    _script(serving, GenerationChunk(text="a", logprobs=(TokenLogprob(b"a", -0.5, top=top),), finish=Finish.STOP))
    (token,) = (await _answer(serving, logprobs=True, top_logprobs=2))["logprobs"]
    assert [(each["token"], each["logprob"]) for each in token["top_logprobs"]] == [("b", -0.1), ("a", -0.5)]
    refused = await serving.post(CHATS, json=BODIES[CHATS] | {"logprobs": True, "top_logprobs": 2})
    assert "top_logprobs is not supported with stream" in refused.json()["error"]


@pytest.mark.parametrize("path", [CHATS, TEXTS])
@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload")])
async def test_a_request_without_a_prompt_is_answered_at_once(
    serving: Serving, path: str, keep_alive: Any, reason: str
) -> None:
    answer = await serving.post(path, json={"model": CHAT, "keep_alive": keep_alive})
    document = answer.json()
    assert (answer.status_code, document["done"], document["done_reason"]) == (200, True, reason)
    assert not service_of(serving).requests
    assert (await serving.post(path, json={"model": "nothing"})).status_code == 404


# Requests


@pytest.mark.parametrize("path", [CHATS, TEXTS])
async def test_all_options_reach_the_model(serving: Serving, path: str) -> None:
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop": ["a"],
        "num_ctx": 4096,
        "typical_p": 1,
        "mirostat": 0,
    }
    request = await _request(serving, path, options=options)
    assert request.sampling == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )
    assert request.stop == ("a",)
    assert (await _request(serving, path, options={"num_predict": -1, "top_k": 0})).sampling == Sampling(top_k=-1)
    assert (await _request(serving, path, options=None)).sampling == Sampling()


async def test_a_conversation_is_one_of_chat(serving: Serving) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is Paris?"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "I look.",
            "tool_calls": [{"function": {"name": "city", "arguments": {"name": "Paris"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_name": "city"},
    ]
    prompt = await _conversation(serving, messages=messages, tools=[TOOL])
    call = {"id": "call00001", "type": "function", "function": {"name": "city", "arguments": '{"name":"Paris"}'}}
    assert prompt.messages == (
        *messages[:2],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "reasoning": "I look.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "sunny", "name": "city", "tool_call_id": "call00001"},
    )
    assert prompt.tools == (TOOL,)
    assert (prompt.tool_choice, prompt.template_options) == ("auto", {})


async def test_calls_and_their_results_have_equal_ids(serving: Serving) -> None:
    def calls(*names: str, **more: Any) -> dict[str, Any]:
        made = [{"function": {"name": name, "arguments": {}}, **more} for name in names]
        return {"role": "assistant", "tool_calls": made}

    def result(**more: Any) -> dict[str, Any]:
        return {"role": "tool", "content": "x", **more}

    messages = [
        calls("a", "b", "b"),
        *(result(tool_name=name) for name in ("b", "a", "b")),
        calls("a", id="given"),
        result(tool_call_id="given"),
        calls("a", "b"),
        result(),
        result(),
        result(tool_name="c"),
    ]
    sent = (await _conversation(serving, messages=messages)).messages
    one, two, three, five, six = (f"call{number:05}" for number in (1, 2, 3, 5, 6))
    made = [[call["id"] for call in message["tool_calls"]] for message in sent if "tool_calls" in message]
    assert made == [[one, two, three], ["given"], [five, six]]
    results = [message.get("tool_call_id") for message in sent if message["role"] == "tool"]
    assert results == [two, one, three, "given", five, six, None]
    wrong = await serving.post(CHATS, json={"model": CHAT, "messages": [{"role": "assistant", "tool_calls": [{}]}]})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "Each tool_call must have a 'function' object")


async def test_the_answer_continues_a_last_message_of_the_assistant(serving: Serving) -> None:
    messages = [*BODIES[CHATS]["messages"], {"role": "assistant", "content": "It is"}]
    prompt = await _conversation(serving, messages=messages)
    assert prompt.continues_final_message
    assert prompt.template_options == {"add_generation_prompt": False}


async def test_a_prompt_is_a_message_unless_it_is_raw(serving: Serving) -> None:
    prompt = await _conversation(serving, TEXTS, system="Be brief.")
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"})
    assert (await _request(serving, TEXTS, raw=True)).prompt == "one two"


@pytest.mark.parametrize(
    ("think", "options"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (None, {}),
    ],
)
@pytest.mark.parametrize("path", [CHATS, TEXTS])
async def test_think_selects_the_reasoning_of_the_template(
    serving: Serving, path: str, think: Any, options: dict[str, Any]
) -> None:
    assert (await _conversation(serving, path, think=think)).template_options == options


@pytest.mark.parametrize("path", [CHATS, TEXTS])
async def test_format_is_a_grammar(serving: Serving, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert (await _request(serving, path, format="json")).grammar == Grammar(GrammarKind.JSON_OBJECT, "")
    grammar = (await _request(serving, path, format=schema)).grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.JSON_SCHEMA, schema)
    assert (await _request(serving, path, format="")).grammar is None


async def test_the_tag_latest_names_the_model(serving: Serving) -> None:
    document = await _answer(serving, model=f"{CHAT}:latest")
    assert document["model"] == f"{CHAT}:latest"


# Embeddings and models


async def test_texts_are_embedded(serving: Serving) -> None:
    document = (await serving.post("/api/embed", json={"model": WORDS, "input": ["aba", "b"]})).json()
    assert document.pop("total_duration") >= 0
    expected = {"model": WORDS, "embeddings": [[3.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]}
    assert document == {**expected, "load_duration": 0, "prompt_eval_count": 4}
    one = await serving.post("/api/embed", json={"model": WORDS, "input": "aba", "options": {"num_ctx": 9}})
    assert one.json()["embeddings"] == [[3.0, 2.0, 0.0, 0.0]]
    limits = []
    for truncate in (None, True, False):
        await serving.post("/api/embed", json={"model": WORDS, "input": "aba", "truncate": truncate})
        limits.append(service_of(serving, WORDS).max_tokens)
    assert limits == [-1, -1, None]
    old = await serving.post("/api/embeddings", json={"model": WORDS, "prompt": "aba"})
    assert old.json() == {"embedding": [3.0, 2.0, 0.0, 0.0]}
    wrong = await serving.post("/api/embed", json={"model": WORDS, "input": "a", "dimensions": 3})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "this model supports only 4 dimensions; got 3")


async def test_text_models_are_listed_and_described(serving: Serving) -> None:
    for path in ("/api/tags", "/api/ps"):
        models = (await serving.get(path)).json()["models"]
        assert [(model["name"], model["model"]) for model in models] == [(CHAT, CHAT), (WORDS, WORDS)]
    assert [model["context_length"] for model in models] == [1000, 0]
    service_of(serving).chat_template = "{{ messages }}"
    service_of(serving).architecture = "Qwen3ForCausalLM"
    service_of(serving).has_reasoning = True
    for body in ({"model": CHAT}, {"name": f"{CHAT}:latest", "verbose": True}):
        document = (await serving.post("/api/show", json=body)).json()
        assert document["capabilities"] == ["completion", "tools", "thinking"]
        info = {"general.architecture": "qwen3", "general.basename": CHAT, "qwen3.context_length": 1000}
        assert document["model_info"] == info
        assert document["template"] == "{{ messages }}"
    assert (await serving.post("/api/show", json={"model": WORDS})).json()["capabilities"] == ["embedding"]
    missing = await serving.post("/api/show", json={"model": "nothing"})
    assert (missing.status_code, "`nothing` does not exist" in missing.json()["error"]) == (404, True)
    assert (await serving.get("/api/version")).json() == {"version": "0.12.0"}


# Errors


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHATS, {"messages": [{"content": "a"}]}, "Every message must have 'role' field"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": "a", "images": [5]}]},
            "messages[0].images[0] is not a string",
        ),
        (CHATS, {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "this model accepts text only"),
        (CHATS, {"options": {"temperature": 3}}, "temperature out of range(0.0, 2.0); got 3"),
        (CHATS, {"options": {"num_predict": "x"}}, "options.num_predict is not an integer"),
        (CHATS, {"options": {"mirostat": 2}}, "mirostat is not supported: the generation library has no Mirostat"),
        (CHATS, {"options": {"top_n": 2}}, "Unknown parameter: 'top_n'; did you mean 'top_"),
        (CHATS, {"format": 5}, 'format is neither "json" nor a JSON schema; got 5'),
        (CHATS, {"think": 5}, "think is neither a boolean nor low, medium or high"),
        (CHATS, {"truncate": 5}, "truncate accepts values true or false; got 5"),
        (CHATS, {"keep_alive": []}, "keep_alive is neither a number nor a string"),
        (CHATS, {"stream": "x"}, "stream field is not a boolean"),
        (TEXTS, {"suffix": "a"}, "suffix is not supported: the model only appends text"),
        (TEXTS, {"template": "a"}, "template is not supported"),
        (TEXTS, {"context": [1]}, "context is not supported: send the conversation to /api/chat"),
        (TEXTS, {"raw": True, "system": "a"}, "system is not supported with raw"),
    ],
)
async def test_an_invalid_body_is_refused_with_the_field(
    serving: Serving, path: str, fields: dict[str, Any], expected: str
) -> None:
    answer = await serving.post(path, json=BODIES[path] | fields)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert expected in answer.json()["error"]
    assert not service_of(serving).requests


@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full"), 429), (ModelFailure("lost"), 500), (ContextExceeded("long", field="prompt"), 400)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_has_its_status(
    serving: Serving, error: Exception, status: int, stream: bool
) -> None:
    service_of(serving).refusal = error
    answer = await serving.post(CHATS, json=BODIES[CHATS] | {"stream": stream})
    assert (answer.status_code, answer.json()) == (status, {"error": str(error)})


async def test_a_failure_of_a_started_stream_is_its_last_line(serving: Serving) -> None:
    _script(serving, GenerationChunk(text="a"), ModelFailure("the engine has exited"))
    lines = await _lines(serving)
    assert lines[-1] == {"error": "the engine has exited"}


@pytest.mark.parametrize(
    ("method", "path"),
    [*(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy")), ("DELETE", "/api/delete")],
)
async def test_changes_of_models_are_refused(serving: Serving, method: str, path: str) -> None:
    answer = await serving.with_http(lambda client: client.request(method, path, json={"model": "a"}))
    assert answer.status_code == 400
    assert "models come from the server's configuration" in answer.json()["error"]


async def test_the_api_is_behind_the_key_of_generation(tmp_path: Path) -> None:
    gate = gate_of({"secret": "infer:*"}, guards_everything=False)
    async with serve_openai(tmp_path, front_end={"gate": gate}) as serving:
        refused = await serving.post(CHATS, json=BODIES[CHATS])
        assert (refused.status_code, list(refused.json())) == (401, ["error"])
        headers = {"authorization": "Bearer secret"}
        assert (await serving.post(CHATS, json=BODIES[CHATS], headers=headers)).status_code == 200
        for path in ("/api/tags", "/api/version"):
            assert (await serving.get(path)).status_code == 401
