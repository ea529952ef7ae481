from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest

from tests.support.tiny_llm import CONTEXT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.system_servers import SystemServers

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


def test_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat"]
    assert client.models.retrieve("chat").owned_by == "OVMS"


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


def test_errors_have_the_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nothing` does not exist; there are: chat") as missing:
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


def test_closed_streams_leave_room_for_the_next_request(client: openai.OpenAI) -> None:
    for _ in range(5):
        stream = client.chat.completions.create(
            model="chat", messages=MESSAGES, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=2)
    assert _usage(answer).completion_tokens == 2


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
