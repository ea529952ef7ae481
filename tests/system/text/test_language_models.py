from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.system_servers import SystemServers
from tests.support.tiny_llm import CONTEXT, write_tiny_folder
from tests.support.waits import until
from tests.support.worker_clients import sample

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
SECONDS = 120
SIZE: Final = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SIZE}}
    for name in ("measure", "paint")
]
NAMED: Final = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture
def client(servers: SystemServers) -> Iterator[openai.OpenAI]:
    url = f"{servers.serving('generation').rest}/v3"
    http = openai.DefaultHttpxClient(trust_env=False, timeout=SECONDS)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as made:
        yield made


def _usage(answer: Any) -> Any:
    assert answer.usage is not None
    return answer.usage


def test_answers_streams_and_responses_have_the_same_text(client: openai.OpenAI) -> None:
    greedy: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**greedy)
    chunks = list(client.chat.completions.create(**greedy, stream=True, stream_options={"include_usage": True}))
    response = client.responses.create(model="chat", input="hello", max_output_tokens=12, temperature=0)
    with client.responses.stream(model="chat", input="hello", max_output_tokens=12, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert whole.choices[0].message.content == text == response.output_text == "".join(deltas)
    assert _usage(whole).completion_tokens == _usage(chunks[-1]).completion_tokens == 12
    assert _usage(whole).prompt_tokens == _usage(chunks[-1]).prompt_tokens
    assert chunks[-2].choices[0].finish_reason == "length"
    assert response.status == "incomplete"


def test_the_apis_of_anthropic_and_ollama_have_the_texts_of_chats(servers: SystemServers) -> None:
    with httpx.Client(base_url=servers.serving("generation").rest, trust_env=False, timeout=SECONDS) as http:

        def ask(path: str, **body: Any) -> Any:
            answer = http.post(path, json={"model": "chat", "messages": MESSAGES, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        chat = ask("/v1/chat/completions", max_tokens=12, temperature=0)
        text, tokens = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
        message = ask("/v1/messages", max_tokens=12, temperature=0)
        usage = message["usage"]
        assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": text}], "max_tokens")
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
        assert ask("/v1/messages/count_tokens") == {"input_tokens": tokens}
        stop = text[4:6]
        stopped = ask("/v1/messages", max_tokens=12, temperature=0, stop_sequences=[stop, "nowhere"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
        assert stopped["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
        tool = {"name": "paint", "input_schema": SIZE}
        forced = {"tools": [tool], "tool_choice": {"type": "any"}}
        called = ask("/v1/messages", max_tokens=100, **forced)
        assert (called["stop_reason"], called["content"][0]["name"]) == ("tool_use", "paint")
        assert called["content"][0]["input"]["size"] in {"small", "large"}
        with_tools = ask("/v1/messages/count_tokens", **forced)["input_tokens"]
        assert with_tools == called["usage"]["input_tokens"] + called["usage"]["cache_read_input_tokens"] > tokens

        options = {"num_predict": 12, "temperature": 0}
        answer = ask("/api/chat", stream=False, options=options)
        assert (answer["message"]["content"], answer["prompt_eval_count"]) == (text, tokens)
        lines = http.post(
            "/api/chat", json={"model": "chat", "messages": MESSAGES, "options": options}
        ).text.splitlines()
        assert "".join(json.loads(line)["message"]["content"] for line in lines) == text
        shaped = ask("/api/chat", stream=False, options={"num_predict": 100}, format=SIZE)["message"]["content"]
        assert json.loads(shaped)["size"] in {"small", "large"}


def test_completions_take_texts_and_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="chat", prompt=["the", "in"], max_tokens=3, echo=True, logprobs=1, temperature=0
    )
    tokens = client.completions.create(model="chat", prompt=[5, 6, 7], max_tokens=3)
    for choice, prompt in zip(answer.choices, ("the", "in"), strict=True):
        assert choice.text.startswith(prompt)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    first, *others = logprobs.token_logprobs or []
    # No token precedes the first one, for which the client's types have no value.
    assert str(first) == "None"
    assert all(value <= 0 for value in others)
    assert _usage(tokens).prompt_tokens == 3


def test_chats_have_the_most_likely_tokens(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, **options, extra_body={"prompt_logprobs": 1}
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert [len(each.top_logprobs) for each in found.content or ()] == [3] * _usage(answer).completion_tokens
    for each in found.content or ():
        values = [one.logprob for one in each.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert each.logprob in values, "the token of a greedy text is among the three most likely ones"
    first, *others = (answer.model_extra or {})["prompt_logprobs"]
    assert first is None
    assert len(others) == _usage(answer).prompt_tokens - 1
    assert all(1 <= len(each) <= 2 for each in others)


def test_errors_have_the_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nothing` does not exist; available: chat") as missing:
        client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature out of range") as wrong:
        client.chat.completions.create(model="chat", messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    long: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 2 * CONTEXT}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as beyond:
            client.chat.completions.create(model="chat", messages=long, stream=stream)
        assert beyond.value.code == "context_length_exceeded"


def test_repeated_prompts_are_reported_as_cached(client: openai.OpenAI, request: pytest.FixtureRequest) -> None:
    prompt = "of the men " * 20 + str(getattr(request.node, "execution_count", 1))
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    usages = [_usage(client.chat.completions.create(**body, temperature=0)) for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages][1:] == [usages[0].prompt_tokens - 1]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "names"), [("required", {"measure", "paint"}), (NAMED, {"paint"})])
def test_forced_call_has_arguments_of_its_schema(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    body: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    body |= {"max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in names
    assert json.loads(call.function.arguments)["size"] in {"small", "large"}
    with client.chat.completions.create(**body, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    parts = [part.function for each in choices for part in each.delta.tool_calls or () if part.function is not None]
    assert "".join(part.name or "" for part in parts) == call.function.name
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments
    assert choices[-1].finish_reason == "tool_calls"


@pytest.fixture
def drained_server(tmp_path: Path) -> Iterator[OvmsProcess]:
    # Neither a cache of prefixes nor bfloat16: the choice of two tokens that are almost equally likely must not depend
    # on the other texts of the batch.
    options = ["--model_name", "chat", "--model_path", str(write_tiny_folder(tmp_path / "model"))]
    options += ["--task", "text_generation", "--enable_prefix_caching", "false", "--drain_seconds", str(SECONDS)]
    options += ["--plugin_config", '{"INFERENCE_PRECISION_HINT": "f32"}']
    with serving(*options, log=tmp_path / "log") as running:
        yield running


def _body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def _completion(client: httpx.Client, tokens: int) -> str:
    answer = client.post("/v3/completions", json=_body("of the barn", tokens)).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_clients_that_leave_change_no_other_completion(drained_server: OvmsProcess) -> None:
    with httpx.Client(base_url=drained_server.rest, timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
        alone = _completion(client, 400)
        other = pool.submit(_completion, client, 400)
        for count in range(40):
            body = _body(f"number {count}", 1500, stream=True)
            with client.stream("POST", "/v3/completions", json=body) as answer:
                assert len(list(islice(answer.iter_lines(), count))) == count
        assert other.result() == alone
        until(lambda: sample(drained_server, "ovmstrio_llm_requests_running") == 0)
        assert _completion(client, 400) == alone


@pytest.mark.slow
def test_drain_waits_for_streams(drained_server: OvmsProcess) -> None:
    with httpx.Client(base_url=drained_server.rest, timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
        alone = _completion(client, 1000)
        with client.stream("POST", "/v3/completions", json=_body("of the barn", 1000, stream=True)) as answer:
            lines = answer.iter_lines()
            events = [next(lines)]
            stopping = pool.submit(drained_server.stop)
            events += lines
        assert stopping.result()[0] == 0
    assert events[-2:] == ["data: [DONE]", ""]
    documents = (json.loads(line.removeprefix("data: ")) for line in events if line.startswith("data: {"))
    assert "".join(choice["text"] for each in documents for choice in each["choices"]) == alone


GREEDY: Any = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def graph_server(servers: SystemServers) -> OvmsProcess:
    return servers.serving("text_graphs")


@pytest.fixture(params=["text_graphs", "text_graph_workers"], ids=["one process", "two workers"])
def graph_client(servers: SystemServers, request: pytest.FixtureRequest) -> openai.OpenAI:
    url = f"{servers.serving(request.param).rest}/v3"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def _chat_command(graph_server: OvmsProcess, name: str, *options: str) -> dict[str, Any]:
    prompt = ("--once", "Tell me", "--temperature", "0", "--json", *options)
    done = run_ovms("chat", name, "--url", graph_server.rest, *prompt, timeout=120)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.slow
def test_graph_of_ovms_and_entry_have_the_same_text(graph_server: OvmsProcess) -> None:
    entry = _chat_command(graph_server, "alone", "--max_tokens", "8")
    assert (entry["finish_reason"], entry["completion_tokens"]) == ("length", 8)
    assert entry["text"]
    for name in ("graph", "in_models"):
        assert _chat_command(graph_server, name, "--max_tokens", "8")["text"] == entry["text"]
        assert _chat_command(graph_server, name)["completion_tokens"] == 12
    refused = run_ovms("chat", "graph", "--url", graph_server.rest, "--once", "Hi", "--max_tokens", "13", timeout=120)
    assert refused.returncode == 1
    assert "max_tokens" in refused.stderr


@pytest.mark.slow
def test_language_models_are_listed_without_tensors(graph_server: OvmsProcess) -> None:
    done = run_ovms("models", "--url", graph_server.grpc, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no tensors") == 3
    assert done.stdout.count("READY") == 4


@pytest.mark.slow
def test_check_loads_all_language_models(graph_server: OvmsProcess, servers: SystemServers) -> None:
    done = run_ovms("check", str(servers.folder("text_graphs") / "config.json"), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 versions loaded" in done.stdout


def _complete(graph_client: openai.OpenAI, name: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Tell me"}]
    return graph_client.chat.completions.create(model=name, messages=messages, **GREEDY, **more)


@pytest.mark.slow
def test_python_nodes_change_requests_and_answers_of_a_model(graph_client: openai.OpenAI) -> None:
    with graph_client:
        expected = _complete(graph_client, "alone").choices[0].message.content.upper()
        for _ in range(3):
            whole = _complete(graph_client, "shouting")
            assert (whole.model, whole.choices[0].message.content) == ("shouting", expected)
            chunks = list(_complete(graph_client, "shouting", stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        longer = _complete(graph_client, "shouting", extra_headers={"x-words": "more"})
        assert longer.usage.prompt_tokens > whole.usage.prompt_tokens
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                _complete(graph_client, "shouting", stream=is_stream, top_p=7)
            assert caught.value.param == "top_p"
